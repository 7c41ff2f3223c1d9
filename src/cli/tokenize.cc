#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/prompts.h"
#include "model/utf8.h"

namespace treeline::cli {
namespace {

struct TokenizeOptions {
  std::string model;
  std::optional<std::string> text;
  bool special = false;
  bool start = false;
  std::string json;
};

void Run(const TokenizeOptions& options) {
  if (!IsFirst()) return;
  const model::LlamaModel model(options.model);
  const model::Vocabulary vocabulary(model);
  const std::string text = options.text ? *options.text : ReadStandardInput();
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const model::Token token : vocabulary.Tokenize(text, options.start, options.special)) {
    const std::string piece = vocabulary.Name(token);
    rows.push_back({{"token", token}, {"text", piece}});
    if (options.json != "-") {
      // As JSON does it: a piece may hold a line's end, or half a character.
      const std::string shown =
          nlohmann::json(piece).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
      std::printf("%6d %s\n", token, model::Printable(shown).c_str());
    }
  }
  WriteJson(options.json, rows);
}

}  // namespace

void AddTokenize(CLI::App& program) {
  auto options = std::make_shared<TokenizeOptions>();
  CLI::App* command = program.add_subcommand("tokenize", "Show the tokens of a text");
  command->add_option("-m,--model", options->model, "Model, a GGUF file")
      ->required()
      ->type_name("FILE");
  command->add_option("-p,--prompt", options->text, "The text (default: standard input)")
      ->type_name("TEXT");
  command->add_flag("--special", options->special, "Names of special tokens are those tokens");
  command->add_flag("--start", options->start, "With what the model wants at the start of a text");
  AddJsonOption(*command, options->json);
  command->footer(
      "Examples:\n  treeline tokenize -m model.gguf -p \"Once upon a time\"\n"
      "  treeline tokenize -m model.gguf --json tokens.json < text.txt");
  command->callback([options] { Run(*options); });
}

}  // namespace treeline::cli
