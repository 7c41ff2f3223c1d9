#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace treeline::cli {

struct Prompt {
  nlohmann::ordered_json id;  // what a file calls it, or its number
  std::string text;
};

// All of a file, or of standard input. Throws FormatError that says why it cannot be read, or where
// it is not UTF-8.
std::string ReadText(const std::string& path);
std::string ReadStandardInput();

// One JSON object a line: {"prompt": "…"}, and "id" if its answer is to have one. At least one.
std::vector<Prompt> ReadPrompts(const std::string& path);

}  // namespace treeline::cli
