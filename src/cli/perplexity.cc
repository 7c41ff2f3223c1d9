#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/prompts.h"
#include "core/check.h"
#include "schedule/collectives/collectives.h"

namespace treeline::cli {
namespace {

using model::Token;

struct PerplexityOptions {
  ModelOptions model;
  std::string file;
  std::int64_t skip = 0;
  std::string json;
};

// The tokens of the text, at least one of which is to be predicted.
std::vector<Token> ReadTokens(const PerplexityOptions& options, const ModelRun& run) {
  std::vector<Token> tokens = run.vocabulary().Tokenize(ReadText(options.file), true, false);
  Require(tokens.size() >= 2, "'", options.file, "' has ", tokens.size(), " tokens; 2 are needed");
  const auto count = static_cast<std::int64_t>(tokens.size());
  Require(options.skip < count - 1, "--skip is ", options.skip, "; the text has ", count,
          " tokens");
  return tokens;
}

void Run(const PerplexityOptions& options) {
  ModelRun run(options.model);
  // Rank 0 reads and tokenizes: other hosts may not have the file.
  std::vector<Token> tokens;
  if (IsFirst()) tokens = ReadTokens(options, run);
  auto count = static_cast<std::int64_t>(tokens.size());
  if (Communicator* comm = Processes()) {
    Broadcast(*comm, 0, std::as_writable_bytes(std::span(&count, 1)));
  }
  run.Need(count);
  double sum = 0.0;
  std::optional<Progress> progress(std::in_place, "perplexity", tokens.size());
  run.Run(1, [&](ModelRank& rank) {
    const bool first = rank.comm.rank() == 0;
    const std::vector<Token> own = Share(rank.comm, first ? tokens : std::vector<Token>{});
    const SequenceId id = rank.llama.cache().Add(0);
    const double of_rank = rank.llama.LogLikelihood(id, own, options.skip, [&](std::int64_t done) {
      if (first) progress->Set(static_cast<std::size_t>(done));
    });
    if (first) sum = of_rank;
  });
  progress.reset();
  if (!IsFirst()) return;
  const std::int64_t predicted = count - 1 - options.skip;
  const double perplexity = std::exp(-sum / static_cast<double>(predicted));
  if (options.json != "-") {
    std::printf("perplexity %.5f over %lld tokens\n", perplexity,
                static_cast<long long>(predicted));
  }
  WriteJson(options.json, {{"perplexity", perplexity},
                           {"tokens", predicted},
                           {"ranks", run.ranks()},
                           {"model", run.model().shape().name}});
}

}  // namespace

void AddPerplexity(CLI::App& program) {
  auto options = std::make_shared<PerplexityOptions>();
  CLI::App* command = program.add_subcommand(
      "perplexity", "How well a model predicts a text: exp of the mean of -log p(token)");
  AddModelOptions(*command, options->model);
  command->add_option("-f,--file", options->file, "The text")->required()->type_name("FILE");
  command->add_option("--skip", options->skip, "Tokens at the start that are not counted")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 32))
      ->capture_default_str()
      ->type_name("N");
  AddJsonOption(*command, options->json);
  command->footer(
      "Rank 0 alone reads the text. It is computed as a prompt is, so options of decoding\n"
      "(--schedule, --reproducible, --int8-queries) change nothing.\n\n"
      "Examples:\n  treeline perplexity -m model.gguf -f text.txt\n"
      "  mpirun -n 4 treeline perplexity -m model.gguf -f text.txt --skip 512 --json report.json");
  command->callback([options] { Run(*options); });
}

}  // namespace treeline::cli
