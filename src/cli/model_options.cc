#include "cli/model_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "core/check.h"
#include "schedule/collectives/collectives.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {
namespace {

int OneNumber(const std::vector<int>& ranks) {
  Require(ranks.size() == 1, "--ranks has ", ranks.size(), " numbers; a model runs on one");
  return ranks[0];
}

int ThreadsOf(const ModelOptions& options, int ranks) {
  if (options.threads > 0) return options.threads;
  return std::max(1, HostCores() / RanksHere(ranks));
}

model::Activations ParseActivations(const std::string& name) {
  if (name == "f32") return model::Activations::kF32;
  return name == "bf16" ? model::Activations::kBf16 : model::Activations::kI16;
}

}  // namespace

void AddModelOptions(CLI::App& command, ModelOptions& options) {
  command.add_option("-m,--model", options.file, "Model, a GGUF file")
      ->required()
      ->type_name("FILE");
  command.add_option("--ranks", options.ranks, "Number of ranks (default: 1, or mpirun's)")
      ->check(CLI::Range(1, ThreadGroup::kMaxRanks))
      ->expected(1)
      ->type_name("N");
  command
      .add_option("--threads", options.threads,
                  "Threads of each rank (default: all cores, divided among ranks)")
      ->check(CLI::Range(1, ThreadPool::kMaxThreads))
      ->type_name("N");
  command
      .add_option("--ctx", options.context,
                  "Tokens that the cache holds, of all ranks (default: what is needed)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 32))
      ->type_name("N");
  command.add_option("--kv-type", options.kv_type, "Type of keys and values in the cache")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8_0"}))
      ->capture_default_str()
      ->type_name("T");
  command.add_option("--schedule", options.schedule, "How ranks share the attention of decoding")
      ->check(CLI::IsMember(
          {"tree", "gather", "tree-3", "heads", "two-level", "ring-kv", "ring-q", "auto"}))
      ->capture_default_str()
      ->type_name("S");
  command
      .add_option("--node-size", options.node_size, "Ranks of a node (default: those of a host)")
      ->check(CLI::Range(1, ThreadGroup::kMaxRanks))
      ->type_name("N");
  command
      .add_option(
          "--activations", options.activations,
          "i16: rounded to 14 or 16 bits where that is faster, which docs/model.md lists; f32: "
          "exact and slower; bf16: to 8 bits in prefill, on CPUs that multiply in bf16")
      ->check(CLI::IsMember({"i16", "f32", "bf16"}))
      ->capture_default_str()
      ->type_name("WHAT");
  command.add_flag("--reproducible", options.reproducible,
                   "Decode to the same bits on every number of ranks that divides 64");
  command.add_flag(
      "--int8-queries", options.int8_queries,
      "With --kv-type q8_0, let queries be rounded to 8 bits, too: faster, less exact");
  AddRankOptions(command, options.where);
}

void AddSamplingOptions(CLI::App& command, model::SamplerOptions& options) {
  command.add_option("--temp", options.temperature, "Temperature; 0 takes the likeliest token")
      ->check(CLI::Range(0.0, 1000.0))
      ->capture_default_str()
      ->type_name("X");
  command.add_option("--top-k", options.top_k, "Sample among so many; 0: all")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str()
      ->type_name("N");
  command.add_option("--top-p", options.top_p, "Sample among those that have this probability")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str()
      ->type_name("P");
  command.add_option("--min-p", options.min_p, "Least probability, of that of the likeliest")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str()
      ->type_name("P");
  command.add_option("--repeat-penalty", options.repeat_penalty, "Of the last 64 tokens; 1: none")
      ->check(CLI::Range(0.01, 100.0))
      ->capture_default_str()
      ->type_name("X");
  command.add_option("--seed", options.seed, "Seed of the sampling")
      ->capture_default_str()
      ->type_name("N");
}

ModelRun::ModelRun(const ModelOptions& options)
    : options_(options),
      ranks_(OneNumber(JoinRanks(options.where, options.ranks, {1}, std::max(1, options.threads)))),
      threads_(ThreadsOf(options, ranks_)),
      model_(options.file),
      vocabulary_(model_),
      context_(options.context) {
  Require(!options.int8_queries || options.kv_type == "q8_0",
          "--int8-queries needs --kv-type q8_0, not ", options.kv_type);
  Require(context_ <= model_.shape().context, "--ctx is ", context_, "; the model was made for ",
          model_.shape().context, " tokens");
}

void ModelRun::Need(std::int64_t tokens) {
  if (options_.context > 0) return;
  Require(tokens <= model_.shape().context, tokens, " tokens are needed; the model was made for ",
          model_.shape().context);
  context_ = std::max(context_, tokens);
}

void ModelRun::Run(int sequences, const std::function<void(ModelRank&)>& body) {
  const model::LlamaOptions llama_options{.kv_type = ParseDType(options_.kv_type),
                                          .activations = ParseActivations(options_.activations),
                                          .schedule = ParseSchedule(options_.schedule),
                                          .node_size = options_.node_size,
                                          .reproducible = options_.reproducible,
                                          .int8_queries = options_.int8_queries,
                                          .tokens = std::max<std::int64_t>(context_, 1),
                                          .sequences = sequences};
  const bool crowded = RanksHere(ranks_) * threads_ > HostCores();
  RunOverRanks(
      {.ranks = ranks_, .timeout = options_.where.milliseconds(), .threads_per_rank = threads_},
      [&](Communicator& comm) {
        ThreadPool pool(threads_,
                        crowded ? std::chrono::microseconds(0) : ThreadPool::kDefaultSpin);
        const Context context{.pool = &pool, .isa = DefaultIsa(), .poll = ProgressOf(comm)};
        model::LlamaRank llama(model_, comm, context, llama_options);
        model::Generator generator(llama, comm);
        ModelRank rank{comm, llama, generator};
        body(rank);
      });
}

std::vector<model::Token> Share(Communicator& comm, std::vector<model::Token> tokens) {
  std::uint64_t count = tokens.size();
  Broadcast(comm, 0, std::as_writable_bytes(std::span(&count, 1)));
  tokens.resize(count);
  Broadcast(comm, 0, std::as_writable_bytes(std::span(tokens)));
  return tokens;
}

}  // namespace treeline::cli
