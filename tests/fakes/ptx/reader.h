// Reads a PTX text into a Module: reader.cpp the declarations, decode.cpp the instructions.
#pragma once

#include "fakes/ptx/lexer.h"
#include "fakes/ptx/module.h"

namespace ptx {

class Reader {
 public:
  explicit Reader(const std::string& text) : lexer_(text) {}
  std::shared_ptr<Module> read();

 private:
  struct Register {
    int row;
    Type type;
  };
  // A .func: each formal parameter and result is a row, of up to 8 bytes.
  struct Function {
    std::vector<int> arguments, results;
    int first = -1;  // instruction; -1 until the body is read
  };
  // The names that a pair of braces declares.
  struct Scope {
    std::map<std::string, Type> prefixes;  // "%r" of "%r<7>"
    std::map<std::string, Register> registers;
    std::map<std::string, int> slots;  // parameters of calls
  };
  struct Variable {
    std::string name;
    size_t align = 1, nbytes = 0;
  };

  // reader.cpp
  void read_top();
  void read_file();
  void read_shared();
  void read_entry();
  void read_parameters(Kernel& kernel);
  void read_function();
  void read_formals(const std::string& list, std::vector<int>& rows);
  void read_body();
  void read_statement();
  void read_registers();
  Variable variable(const std::string& declaration);
  int new_row();
  void number_rows();
  Register find(const std::string& name);
  int slot(const std::string& name);
  uint64_t symbol(const std::string& name);  // the address of a variable or parameter, or 0

  // decode.cpp
  void read_instruction(std::string opcode);
  void decode(Instruction& instruction, const std::string& opcode, const std::vector<std::string>& operands);
  void decode_shuffle(Instruction&, const std::vector<std::string>& parts, const std::vector<std::string>& operands);
  void decode_call(Instruction&, const std::vector<std::string>& operands);
  void decode_memory(Instruction&, const std::vector<std::string>& parts, const std::vector<std::string>& operands);
  void decode_atomic(Instruction&, const std::vector<std::string>& parts, const std::vector<std::string>& operands);
  std::string decode_address(Instruction& instruction, const std::string& bracket);
  bool decode_slot(Instruction&, const std::string& base, const std::string& value, bool load);
  void decode_move(Instruction&, const std::vector<std::string>& operands);
  void decode_convert(Instruction&, const std::vector<std::string>& parts, const std::vector<std::string>& operands);
  void decode_plain(Instruction&, const std::vector<std::string>& parts, const std::vector<std::string>& operands);
  void add_target(Instruction& instruction, const std::string& name);
  void add_source(Instruction& instruction, const std::string& operand, Type type);
  int constant(uint64_t value);
  uint64_t number(const std::string& text, Type type);

  // Rows of a kernel are numbered from here until those of all functions, which come before them, are known.
  static constexpr int kFirstKernelRow = 1 << 24;
  Lexer lexer_;
  std::shared_ptr<Module> module_;
  bool in_kernel_ = false;
  int kernel_rows_ = 0;
  int file_ = 0, source_line_ = 0;
  std::vector<Scope> scopes_;
  std::map<std::string, uint64_t> parameters_;
  std::map<std::string, Function> functions_;
  std::map<std::string, int> labels_;
  std::vector<std::pair<size_t, std::string>> jumps_, calls_;
  std::map<uint64_t, int> constants_;
};

}  // namespace ptx
