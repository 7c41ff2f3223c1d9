#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/answers.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/prompts.h"
#include "core/check.h"
#include "model/saved_context.h"
#include "schedule/collectives/collectives.h"

namespace treeline::cli {
namespace {

using model::Token;

struct GenerateOptions {
  ModelOptions model;
  model::SamplerOptions sampling;
  std::optional<std::string> prompt;
  std::string file;
  std::string prompts;
  bool chat = false;
  std::int64_t tokens = 128;
  int at_a_time = 8;
  int logprobs = 0;
  std::string save;
  std::string load;
  std::string json;

  bool batch() const { return !prompts.empty(); }
};

void RequireOnePrompt(const GenerateOptions& options) {
  const int given =
      (options.prompt ? 1 : 0) + (options.file.empty() ? 0 : 1) + (options.batch() ? 1 : 0);
  Require(given == 1, "one of -p, -f and --prompts is needed; ", given, " were given");
  Require(!options.batch() || (options.save.empty() && options.load.empty()),
          "--save-context and --load-context are for one prompt, not for --prompts");
  Require(!options.batch() || options.json != "-",
          "--json - is for one prompt: answers of --prompts go to standard output");
  Require(options.batch() || options.logprobs == 0 || !options.json.empty(),
          "--logprobs of one prompt go to JSON: --json FILE is needed");
}

std::vector<Prompt> FindPrompts(const GenerateOptions& options) {
  if (options.batch()) return ReadPrompts(options.prompts);
  return {{nullptr, options.prompt ? *options.prompt : ReadText(options.file)}};
}

model::Request MakeRequest(const GenerateOptions& options, std::vector<Token> prompt) {
  return {.prompt = std::move(prompt), .most_tokens = options.tokens, .sampling = options.sampling};
}

// Prompts as tokens, after those of a saved context.
std::vector<model::Request> Tokenize(const GenerateOptions& options, const ModelRun& run,
                                     std::span<const Prompt> prompts) {
  const model::Vocabulary& vocabulary = run.vocabulary();
  std::vector<Token> before;
  if (!options.load.empty()) {
    before =
        model::DescribeContext(run.model(), ParseDType(options.model.kv_type), options.load).tokens;
  }
  std::vector<model::Request> requests;
  for (const Prompt& prompt : prompts) {
    const std::string text =
        options.chat ? vocabulary.Format({{"user", prompt.text}}) : prompt.text;
    std::vector<Token> tokens = before;
    const std::vector<Token> own = vocabulary.Tokenize(text, before.empty(), options.chat);
    tokens.insert(tokens.end(), own.begin(), own.end());
    Require(!prompt.text.empty() || !before.empty(), "the prompt is empty",
            options.batch() ? ", that of id " + prompt.id.dump() : "",
            "; a model continues what it has");
    requests.push_back(MakeRequest(options, std::move(tokens)));
  }
  return requests;
}

// How much the cache must hold, which all ranks must know before they start.
struct Size {
  std::int64_t sequences = 1;
  std::int64_t longest = 0;  // tokens of one, with its answer
  std::int64_t all = 0;      // of those that are answered at a time, at most
};

Size SizeOf(const GenerateOptions& options, std::span<const model::Request> requests) {
  Size size;
  for (const model::Request& request : requests) {
    const auto tokens = static_cast<std::int64_t>(request.prompt.size()) + request.most_tokens;
    size.longest = std::max(size.longest, tokens);
    size.all += tokens;
  }
  size.sequences =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(requests.size()), 1, options.at_a_time);
  size.all = std::min(size.all, size.longest * size.sequences);
  return size;
}

nlohmann::ordered_json Summarize(const Answers& answers, const ModelRun& run,
                                 const model::GenerationCost& cost, std::int64_t kv_bytes) {
  const auto per = [](double amount, double of) { return of > 0.0 ? amount / of : 0.0; };
  const auto tokens = static_cast<double>(cost.tokens);
  return {{"model", run.model().shape().name},
          {"ranks", run.ranks()},
          {"threads", run.threads()},
          {"prompt_tokens", answers.prompt_tokens()},
          {"tokens", answers.tokens()},
          {"first_token_seconds", answers.first_token_seconds()},
          {"prompt_tokens_per_second",
           per(static_cast<double>(cost.prompt_tokens), cost.prompt_seconds)},
          {"tokens_per_second", per(tokens, cost.seconds)},
          {"kv_bytes_per_rank", kv_bytes},
          {"bytes_sent_per_token", per(static_cast<double>(cost.bytes), tokens)},
          {"rounds_per_token", per(static_cast<double>(cost.rounds), tokens)}};
}

void PrintTable(const nlohmann::ordered_json& json) {
  const auto number = [&](const char* key) { return json[key].get<double>(); };
  std::fprintf(
      stderr,
      "\n%-22s %lld prompt, %lld generated\n%-22s %.2f s (%.1f prompt tokens/s)\n%-22s "
      "%.1f tokens/s\n%-22s %d x %d threads\n%-22s %.2f MB\n%-22s %.0f bytes, %.0f rounds\n",
      "tokens", json["prompt_tokens"].get<long long>(), json["tokens"].get<long long>(),
      "first token after", number("first_token_seconds"), number("prompt_tokens_per_second"),
      "decoding", number("tokens_per_second"), "ranks", json["ranks"].get<int>(),
      json["threads"].get<int>(), "KV cache of a rank", number("kv_bytes_per_rank") / 1e6,
      "sent for a token", number("bytes_sent_per_token"), number("rounds_per_token"));
}

// One sequence, which may have been saved, and may be.
void AnswerOne(const GenerateOptions& options, ModelRank& rank, const model::Request& request,
               const model::GenerationEvents& events) {
  const SequenceId id = rank.llama.cache().Add(0);
  std::vector<Token> tokens;
  if (!options.load.empty()) {
    tokens = model::LoadContext(rank.llama, rank.comm, id, options.load);
  }
  rank.generator.Continue(id, tokens, request, events);
  if (!options.save.empty()) {
    model::SaveContext(rank.llama, rank.comm, id, tokens, options.save);
  }
}

void Run(const GenerateOptions& options) {
  RequireOnePrompt(options);
  ModelRun run(options.model);
  // Rank 0 reads and tokenizes: other hosts may not have the files.
  std::vector<model::Request> requests;
  std::vector<nlohmann::ordered_json> ids;
  if (IsFirst()) {
    const std::vector<Prompt> prompts = FindPrompts(options);
    requests = Tokenize(options, run, prompts);
    if (options.batch()) {
      for (const Prompt& prompt : prompts) ids.push_back(prompt.id);
    }
  }
  Size size = SizeOf(options, requests);
  if (Communicator* comm = Processes()) {
    Broadcast(*comm, 0, std::as_writable_bytes(std::span(&size, 1)));
  }
  run.Need(size.longest);
  run.Need(std::min(size.all, run.model().shape().context));

  Answers answers(
      run.vocabulary(), requests,
      {.ids = std::move(ids), .print = options.json != "-", .logprobs = options.logprobs});
  const model::GenerationEvents events = answers.Listen();
  model::GenerationCost cost;
  std::int64_t kv_bytes = 0;
  run.Run(static_cast<int>(size.sequences), [&](ModelRank& rank) {
    std::vector<model::Request> own;
    const std::vector<Token> count = Share(rank.comm, {static_cast<Token>(requests.size())});
    for (std::size_t i = 0; i < static_cast<std::size_t>(count[0]); ++i) {
      own.push_back(MakeRequest(
          options,
          Share(rank.comm, rank.comm.rank() == 0 ? requests[i].prompt : std::vector<Token>{})));
    }
    if (options.batch()) {
      rank.generator.Run(own, static_cast<int>(size.sequences), events);
    } else {
      AnswerOne(options, rank, own[0], events);
    }
    if (rank.comm.rank() != 0) return;
    cost = rank.generator.cost();
    kv_bytes = rank.llama.cache().peak_pages() *
               static_cast<std::int64_t>(rank.llama.cache().bytes_per_page());
  });
  if (!IsFirst()) return;
  nlohmann::ordered_json json = Summarize(answers, run, cost, kv_bytes);
  PrintTable(json);
  if (!options.batch()) json.update(answers.ToJson());
  WriteJson(options.json, json);
}

}  // namespace

void AddGenerate(CLI::App& program) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = program.add_subcommand(
      "generate", "Continue a prompt, or answer it, with the context spread over ranks");
  AddModelOptions(*command, options->model);
  command->add_option("-p,--prompt", options->prompt, "The prompt")->type_name("TEXT");
  command->add_option("-f,--file", options->file, "A file that holds the prompt")
      ->type_name("FILE");
  command
      ->add_option("--prompts", options->prompts,
                   "Many prompts, a JSON object {\"prompt\": …} each line; answers likewise")
      ->type_name("FILE");
  command->add_flag("--chat", options->chat,
                    "The prompt is a question to a model that was trained for chats");
  command->add_option("-n,--tokens", options->tokens, "Tokens to generate at most")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 32))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--parallel", options->at_a_time, "Prompts that are answered at a time")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str()
      ->type_name("N");
  command
      ->add_option("--save-context", options->save,
                   "Save prompt and answer, with their keys and values, to a folder")
      ->type_name("DIR");
  command
      ->add_option("--load-context", options->load,
                   "Go on from what was saved there, on any number of ranks; the prompt follows it")
      ->type_name("DIR");
  AddSamplingOptions(*command, options->sampling);
  command
      ->add_option("--logprobs", options->logprobs,
                   "Note the log-probabilities of so many of the likeliest tokens, in JSON")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str()
      ->type_name("N");
  AddJsonOption(*command, options->json);
  command->footer(
      "The text alone goes to standard output, as it comes; all else to standard error.\n\n"
      "Examples:\n  treeline generate -m model.gguf -p \"Once upon a time\" -n 50\n"
      "  treeline generate -m model.gguf --chat -f question.txt --ranks 4\n"
      "  mpirun -n 4 treeline generate -m model.gguf --prompts prompts.jsonl > answers.jsonl");
  command->callback([options] { Run(*options); });
}

}  // namespace treeline::cli
