// The text of a PTX module, character by character: words, punctuation, comments, line numbers.
#pragma once

#include <string>
#include <vector>

namespace ptx {

std::string trimmed(const std::string& text);
// Splits at a character that stands outside of brackets.
std::vector<std::string> split(const std::string& text, char by);
// The items of "{a, b}" or "(a, b)".
std::vector<std::string> items_of(const std::string& bracketed);

class Lexer {
 public:
  explicit Lexer(const std::string& text) : text_(text) {}
  // Throws std::runtime_error with the current line.
  [[noreturn]] void fail(const std::string& why) const;

  bool skip_space();  // and comments; false at the end of the text
  std::string word();
  bool take(char c);
  void expect(char c);
  std::string until(char end);  // without comments; takes the end, too
  std::string rest_of_line();
  char peek() const { return text_[at_]; }
  std::string context() const { return text_.substr(at_, 30); }
  int line() const { return line_; }

 private:
  void skip_line_comment();
  void skip_block_comment();

  const std::string& text_;
  size_t at_ = 0;
  int line_ = 1;
};

}  // namespace ptx
