#include "fakes/ptx/lexer.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

namespace ptx {
namespace {

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)); }
bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

}  // namespace

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  int depth = 0;
  std::string part;
  for (char c : text) {
    depth += (c == '[' || c == '{' || c == '(') - (c == ']' || c == '}' || c == ')');
    if (c == by && depth == 0) {
      parts.push_back(trimmed(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trimmed(part).empty() || !parts.empty()) parts.push_back(trimmed(part));
  return parts;
}

std::vector<std::string> items_of(const std::string& bracketed) {
  return split(bracketed.substr(1, bracketed.size() - 2), ',');
}

void Lexer::fail(const std::string& why) const {
  throw std::runtime_error("PTX line " + std::to_string(line_) + ": " + why);
}

void Lexer::skip_line_comment() { at_ = std::min(text_.find('\n', at_), text_.size()); }

void Lexer::skip_block_comment() {
  const size_t end = text_.find("*/", at_);
  if (end == std::string::npos) fail("a comment that does not end");
  line_ += static_cast<int>(std::count(text_.begin() + static_cast<std::ptrdiff_t>(at_),
                                       text_.begin() + static_cast<std::ptrdiff_t>(end), '\n'));
  at_ = end + 2;
}

bool Lexer::skip_space() {
  while (at_ < text_.size()) {
    if (is_space(text_[at_])) {
      line_ += text_[at_++] == '\n';
    } else if (text_.compare(at_, 2, "//") == 0) {
      skip_line_comment();
    } else if (text_.compare(at_, 2, "/*") == 0) {
      skip_block_comment();
    } else {
      return true;
    }
  }
  return false;
}

std::string Lexer::word() {
  skip_space();
  const size_t begin = at_;
  while (at_ < text_.size() && is_word(text_[at_])) ++at_;
  return text_.substr(begin, at_ - begin);
}

bool Lexer::take(char c) {
  if (!skip_space() || text_[at_] != c) return false;
  ++at_;
  return true;
}

void Lexer::expect(char c) {
  if (!take(c)) fail(std::string("expected ") + c + " before " + context());
}

std::string Lexer::until(char end) {
  std::string out;
  while (skip_space() && text_[at_] != end) {
    out += text_[at_++];
    if (at_ < text_.size() && is_space(text_[at_])) out += ' ';
  }
  if (at_ >= text_.size()) fail(std::string("no ") + end);
  ++at_;
  return out;
}

std::string Lexer::rest_of_line() {
  const size_t begin = at_;
  skip_line_comment();
  return text_.substr(begin, at_ - begin);
}

}  // namespace ptx
