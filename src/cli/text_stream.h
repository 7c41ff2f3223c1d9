#pragma once

#include <string>
#include <string_view>

namespace treeline::cli {

// Prints text that comes in pieces to standard output, characters once they are whole. Throws Error
// if it cannot be written: nobody reads it any more, or the disk is full.
class TextStream {
 public:
  void Write(const std::string& bytes);
  // What is left, and the end of the line.
  void End();
  // Text that is not held back.
  static void WriteWhole(std::string_view text);

 private:
  std::string held_;
};

}  // namespace treeline::cli
