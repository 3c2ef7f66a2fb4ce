#include "fakes/ptx/reader.h"

#include <cctype>
#include <sstream>

namespace ptx {

int size_of(Type type) {
  switch (type) {
    case Type::u8:
    case Type::s8:
    case Type::pred:
      return 1;
    case Type::u16:
    case Type::s16:
    case Type::f16:
    case Type::bf16:
      return 2;
    case Type::u32:
    case Type::s32:
    case Type::f32:
      return 4;
    default:
      return 8;
  }
}

Type type_of(const std::string& name) {
  static const std::map<std::string, Type> types{
      {"pred", Type::pred}, {"b8", Type::u8},   {"u8", Type::u8},   {"s8", Type::s8},   {"b16", Type::u16},
      {"u16", Type::u16},   {"s16", Type::s16}, {"b32", Type::u32}, {"u32", Type::u32}, {"s32", Type::s32},
      {"b64", Type::u64},   {"u64", Type::u64}, {"s64", Type::s64}, {"f16", Type::f16}, {"bf16", Type::bf16},
      {"f32", Type::f32},   {"f64", Type::f64}};
  const auto found = types.find(name);
  return found == types.end() ? Type::none : found->second;
}

std::shared_ptr<Module> Reader::read() {
  module_ = std::make_shared<Module>();
  while (lexer_.skip_space()) read_top();
  for (const auto& [at, name] : calls_) {
    const Function& function = functions_.at(name);
    if (function.first < 0) lexer_.fail("the function " + name + " has no body");
    module_->code[at].offset = function.first;
  }
  number_rows();
  for (uint64_t value : module_->constants) module_->constant_rows.insert(module_->constant_rows.end(), kLanes, value);
  return module_;
}

int Reader::new_row() { return in_kernel_ ? kFirstKernelRow + kernel_rows_++ : module_->function_rows++; }

void Reader::number_rows() {
  const auto number = [&](int& row) {
    if (row >= kFirstKernelRow) row += module_->function_rows - kFirstKernelRow;
  };
  for (Instruction& instruction : module_->code) {
    number(instruction.guard);
    for (int& row : instruction.to) number(row);
    for (int& row : instruction.from) number(row);
    for (auto* rows : {&instruction.arguments, &instruction.results})
      for (auto& [to, from] : *rows) {
        number(to);
        number(from);
      }
  }
  for (auto& [name, kernel] : module_->kernels) kernel.rows += module_->function_rows;
}

void Reader::read_top() {
  const std::string name = lexer_.word();
  if (name == ".version" || name == ".target" || name == ".address_size") {
    lexer_.rest_of_line();
  } else if (name == ".file") {
    read_file();
  } else if (name == ".entry") {
    read_entry();
  } else if (name == ".func") {
    read_function();
  } else if (name == ".shared") {
    read_shared();
  } else if (name == ".section") {  // debug information
    lexer_.until('{');
    lexer_.until('}');
  } else if (name != ".visible" && name != ".weak" && name != ".extern") {
    lexer_.fail("unknown directive " + name + " before " + lexer_.context());
  }
}

void Reader::read_file() {
  std::stringstream rest(lexer_.rest_of_line());
  int number;
  std::string path;
  rest >> number >> path;
  module_->files[number] = path.substr(1, path.find('"', 1) - 1);
}

// " .align 8 .b8 name[64]"
Reader::Variable Reader::variable(const std::string& declaration) {
  Variable made;
  std::stringstream words(declaration);
  for (std::string each; words >> each;) {
    if (each == ".align") {
      words >> made.align;
    } else if (each[0] != '.') {
      made.name = each;
    } else if (each != ".param" && each != ".global" && each != ".ptr") {
      const Type type = type_of(each.substr(1));
      if (type == Type::none) lexer_.fail("unknown type " + each);
      made.nbytes = static_cast<size_t>(size_of(type));
    }
  }
  const size_t bracket = made.name.find('[');
  if (bracket != std::string::npos) {
    made.nbytes *= std::stoul(made.name.substr(bracket + 1));
    made.name.resize(bracket);
  }
  return made;
}

void Reader::read_shared() {
  const Variable made = variable(lexer_.until(';'));
  uint64_t& end = module_->shared_nbytes;
  end = (end + made.align - 1) / made.align * made.align;
  module_->shared[made.name] = {kSharedBegin + end, made.nbytes};
  end += made.nbytes;
}

void Reader::read_parameters(Kernel& kernel) {
  parameters_.clear();
  if (!lexer_.take('(')) return;
  for (const std::string& each : split(lexer_.until(')'), ',')) {
    if (each.empty()) continue;
    const Variable made = variable(each);
    // The alignment that follows .ptr is of the memory it points to.
    const size_t align = made.nbytes > 8 ? made.align : made.nbytes;
    kernel.parameters_nbytes = (kernel.parameters_nbytes + align - 1) / align * align;
    kernel.parameters.push_back({made.name, made.nbytes, kernel.parameters_nbytes});
    parameters_[made.name] = kParamBegin + kernel.parameters_nbytes;
    kernel.parameters_nbytes += made.nbytes;
  }
}

void Reader::read_entry() {
  Kernel kernel;
  kernel.name = lexer_.word();
  scopes_.assign(1, {});
  read_parameters(kernel);
  while (lexer_.skip_space() && lexer_.peek() != '{') {
    const std::string name = lexer_.word();
    if (name == ".maxntid") {
      kernel.max_threads = static_cast<uint32_t>(std::stoul(lexer_.word()));
      while (lexer_.take(',')) kernel.max_threads *= static_cast<uint32_t>(std::stoul(lexer_.word()));
    } else if (name == ".minnctapersm") {
      lexer_.word();
    } else {
      lexer_.fail("unknown directive of a kernel " + name);
    }
  }
  kernel.first = static_cast<int>(module_->code.size());
  in_kernel_ = true;
  kernel_rows_ = 0;
  read_body();
  in_kernel_ = false;
  kernel.rows = kernel_rows_;
  kernel.last = static_cast<int>(module_->code.size());
  module_->kernels[kernel.name] = kernel;
}

void Reader::read_formals(const std::string& list, std::vector<int>& rows) {
  for (const std::string& each : split(list, ',')) {
    if (each.empty()) continue;
    const Variable formal = variable(each);
    if (formal.nbytes > 8) lexer_.fail("a function's parameter of more than 8 bytes");
    rows.push_back(new_row());
    scopes_[0].slots[formal.name] = rows.back();
  }
}

void Reader::read_function() {
  scopes_.assign(1, {});
  parameters_.clear();
  Function made;
  if (lexer_.take('(')) read_formals(lexer_.until(')'), made.results);
  const std::string name = lexer_.word();
  lexer_.expect('(');
  read_formals(lexer_.until(')'), made.arguments);
  if (lexer_.take(';')) {  // a declaration
    functions_.emplace(name, made);
    return;
  }
  const auto declared = functions_.find(name);
  if (declared != functions_.end()) {  // calls already use the rows of the declaration
    for (auto& [formal, row] : scopes_[0].slots) {
      for (size_t i = 0; i < made.arguments.size(); ++i)
        if (row == made.arguments[i]) row = declared->second.arguments[i];
      for (size_t i = 0; i < made.results.size(); ++i)
        if (row == made.results[i]) row = declared->second.results[i];
    }
    made = declared->second;
  }
  made.first = static_cast<int>(module_->code.size());
  functions_[name] = made;
  read_body();
}

void Reader::read_body() {
  lexer_.expect('{');
  scopes_.emplace_back();
  labels_.clear();
  jumps_.clear();
  for (int depth = 1; depth > 0;) {
    if (!lexer_.skip_space()) lexer_.fail("the text ends in a body");
    if (lexer_.take('{')) {
      ++depth;
      scopes_.emplace_back();
    } else if (lexer_.take('}')) {
      --depth;
      scopes_.pop_back();
    } else {
      read_statement();
    }
  }
  for (const auto& [at, label] : jumps_) {
    const auto found = labels_.find(label);
    if (found == labels_.end()) lexer_.fail("no label " + label);
    module_->code[at].offset = found->second;
  }
}

void Reader::read_statement() {
  if (lexer_.peek() == '@') return read_instruction("");
  const std::string name = lexer_.word();
  if (name == ".reg") {
    read_registers();
  } else if (name == ".shared") {
    read_shared();
  } else if (name == ".param") {
    const Variable made = variable(lexer_.until(';'));
    if (made.nbytes > 8) lexer_.fail("an argument of more than 8 bytes");
    scopes_.back().slots[made.name] = new_row();
  } else if (name == ".pragma") {
    lexer_.until(';');
  } else if (name == ".loc") {
    std::stringstream words(lexer_.rest_of_line());
    words >> file_ >> source_line_;
  } else if (!name.empty() && name[0] == '.') {
    lexer_.fail("unknown directive " + name);
  } else if (lexer_.take(':')) {
    labels_[name] = static_cast<int>(module_->code.size());
  } else {
    read_instruction(name);
  }
}

void Reader::read_registers() {
  const Type type = type_of(lexer_.word().substr(1));
  for (const std::string& each : split(lexer_.until(';'), ',')) {
    const size_t angle = each.find('<');
    if (angle != std::string::npos)
      scopes_.back().prefixes[each.substr(0, angle)] = type;
    else
      scopes_.back().registers[each] = {new_row(), type};
  }
}

Reader::Register Reader::find(const std::string& name) {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto known = scope->registers.find(name);
    if (known != scope->registers.end()) return known->second;
    size_t digits = name.size();
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
    const auto prefix = scope->prefixes.find(name.substr(0, digits));
    if (digits < name.size() && prefix != scope->prefixes.end())
      return scope->registers[name] = {new_row(), prefix->second};
  }
  for (const char* special : {"%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y",
                              "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%globaltimer"})
    if (name == special) {
      const auto [made, is_new] = module_->specials.emplace(name, module_->function_rows);
      module_->function_rows += is_new;
      return {made->second, name == "%globaltimer" ? Type::u64 : Type::u32};
    }
  lexer_.fail("unknown register " + name);
}

int Reader::slot(const std::string& name) {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto found = scope->slots.find(name);
    if (found != scope->slots.end()) return found->second;
  }
  return -1;
}

uint64_t Reader::symbol(const std::string& name) {
  const auto parameter = parameters_.find(name);
  if (parameter != parameters_.end()) return parameter->second;
  const auto variable = module_->shared.find(name);
  return variable == module_->shared.end() ? 0 : variable->second.first;
}

std::shared_ptr<Module> read_module(const std::string& text) { return Reader(text).read(); }

}  // namespace ptx
