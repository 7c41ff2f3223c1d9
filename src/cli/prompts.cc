#include "cli/prompts.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/check.h"
#include "model/utf8.h"

namespace treeline::cli {
namespace {

[[noreturn]] void ThrowCannotRead(const std::string& what) {
  Throw<FormatError>("cannot read ", what, ": ", std::strerror(errno != 0 ? errno : EIO));
}

void RequireUtf8(const std::string& what, const std::string& text) {
  const std::size_t good = model::Utf8Prefix(text);
  if (good < text.size()) Throw<FormatError>(what, " is not UTF-8 at byte ", good);
}

}  // namespace

std::string ReadText(const std::string& path) {
  errno = 0;
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  // Of an empty file, nothing can be taken, which is no failure.
  if (stream && stream.peek() != std::ifstream::traits_type::eof()) text << stream.rdbuf();
  if (!stream.is_open() || stream.bad() || !text || errno == EISDIR) {
    ThrowCannotRead("'" + path + "'");
  }
  RequireUtf8("'" + path + "'", text.str());
  return text.str();
}

std::string ReadStandardInput() {
  std::string text;
  char part[1 << 16];
  errno = 0;
  while (const std::size_t count = std::fread(part, 1, sizeof(part), stdin)) {
    text.append(part, count);
  }
  if (std::ferror(stdin) != 0) ThrowCannotRead("standard input");
  RequireUtf8("standard input", text);
  return text;
}

std::vector<Prompt> ReadPrompts(const std::string& path) {
  std::istringstream lines(ReadText(path));
  std::vector<Prompt> prompts;
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto json = nlohmann::ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("prompt") || !json["prompt"].is_string()) {
      Throw<FormatError>("'", path, "', line ", number,
                         ": this is no JSON object with a text called \"prompt\"");
    }
    prompts.push_back({json.value("id", nlohmann::ordered_json(prompts.size())),
                       json["prompt"].get<std::string>()});
  }
  if (prompts.empty()) Throw<FormatError>("'", path, "' has no prompts");
  return prompts;
}

}  // namespace treeline::cli
