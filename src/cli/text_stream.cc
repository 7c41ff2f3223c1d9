#include "cli/text_stream.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/check.h"
#include "model/utf8.h"

namespace treeline::cli {

void TextStream::WriteWhole(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    Throw<Error>("cannot write to standard output: ", std::strerror(errno));
  }
}

void TextStream::Write(const std::string& bytes) {
  held_ += bytes;
  const std::size_t whole = held_.size() - model::IncompleteUtf8(held_);
  WriteWhole(std::string_view(held_).substr(0, whole));
  held_.erase(0, whole);
}

void TextStream::End() {
  WriteWhole(held_ + '\n');
  held_.clear();
}

}  // namespace treeline::cli
