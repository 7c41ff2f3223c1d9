#include "cli/bench_model.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "cli/limits.h"
#include "cli/model_options.h"
#include "cli/report.h"
#include "core/check.h"
#include "model/utf8.h"
#include "schedule/collectives/collectives.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {
namespace {

using model::Token;

struct Options {
  ModelOptions model;
  std::vector<std::string> schedules = {"tree"};
  std::vector<std::int64_t> depths = {0, 4096};
  std::int64_t prompt = 512;
  int tokens = 32;
  std::string json;
};

// What one measurement is of.
struct Case {
  bool decode = false;
  Schedule schedule = Schedule::kTree;
  std::int64_t depth = 0;   // tokens before it
  std::int64_t tokens = 0;  // that are computed, one by one in decoding
};

struct Result {
  std::vector<double> seconds;  // of a step: a prompt, or a token
  CommCounters counters;        // of a step, the most of any rank
  double limit_fraction = 0.0;
  double max_error = 0.0;
  std::size_t kv_bytes = 0;  // of a rank

  double TokensPerSecond(const Case& c) const {
    return (c.decode ? 1.0 : static_cast<double>(c.tokens)) / Median(seconds);
  }
};

// Of logits, against the same computed in another way.
double Bound(const Options& options) { return options.model.activations == "bf16" ? 1e-1 : 5e-2; }

// Tokens with random keys and values: as fast to read as others, and here at once.
void FillCache(KvCache& cache, SequenceId id, std::int64_t tokens) {
  if (tokens == 0) return;
  const KvCacheOptions& o = cache.options();
  const SlotRange slots = cache.Grow(id, tokens);
  constexpr std::int64_t kBlock = 256;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> k(static_cast<std::size_t>(kBlock * o.kv_heads * o.head_dim));
  std::vector<float> v(static_cast<std::size_t>(kBlock * o.kv_heads * o.v_head_dim));
  std::ranges::generate(k, [&] { return normal(random); });
  std::ranges::generate(v, [&] { return normal(random); });
  for (int layer = 0; layer < o.layers; ++layer) {
    for (std::int64_t begin = slots.begin; begin < slots.end; begin += kBlock) {
      const std::int64_t count = std::min(kBlock, slots.end - begin);
      cache.Write(id, layer, {begin, begin + count},
                  TensorView::Dense(k.data(), DType::kF32, count, o.kv_heads, o.head_dim),
                  TensorView::Dense(v.data(), DType::kF32, count, o.kv_heads, o.v_head_dim));
    }
  }
}

std::vector<Token> MakeTokens(std::int64_t count, int vocabulary) {
  std::mt19937 random(1);
  std::vector<Token> tokens(static_cast<std::size_t>(count));
  for (Token& token : tokens) {
    token = static_cast<Token>(random() % static_cast<unsigned>(vocabulary));
  }
  return tokens;
}

// Bytes that one token of decoding reads at least, on all ranks.
double BytesRead(const ModelRun& run, const KvCacheOptions& o, std::int64_t depth) {
  const model::LlamaModel& model = run.model();
  // Each token reads one row of the embedding, and all of it only where it is the head as well.
  const bool tied = model.head().data == model.embedding().data;
  const std::size_t embedding =
      tied ? 0 : model.embedding().row_bytes * static_cast<std::size_t>(model.embedding().rows);
  const auto weights = static_cast<double>(model.weight_bytes() - embedding);
  const auto slot =
      static_cast<double>(RowBytes(o.dtype, o.head_dim) + RowBytes(o.dtype, o.v_head_dim));
  return weights + static_cast<double>(depth) * o.layers * o.kv_heads * slot;
}

// How far logits are off at most. A NaN is infinitely far.
double MaxError(std::span<const float> logits, std::span<const float> others) {
  double most = 0.0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double error = std::abs(double{logits[i]} - double{others[i]});
    most = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(most, error);
  }
  return most;
}

// The most of any rank, on all of them.
CommCounters MostOf(Communicator& comm, const CommCounters& own) {
  std::array<std::int64_t, 3> most{own.bytes, own.messages, own.rounds};
  std::array<std::int64_t, 3> scratch{};
  AllReduce(comm, std::as_writable_bytes(std::span(most)),
            std::as_writable_bytes(std::span(scratch)), [](Bytes mine, ConstBytes theirs) {
              std::array<std::int64_t, 3> a{};
              std::array<std::int64_t, 3> b{};
              std::memcpy(a.data(), mine.data(), sizeof(a));
              std::memcpy(b.data(), theirs.data(), sizeof(b));
              for (std::size_t i = 0; i < a.size(); ++i) a[i] = std::max(a[i], b[i]);
              std::memcpy(mine.data(), a.data(), sizeof(a));
            });
  CommCounters counters = own;
  counters.bytes = most[0];
  counters.messages = most[1];
  counters.rounds = most[2];
  return counters;
}

// Tokens one by one. The first is checked against the same token as a prompt of its own, whose
// attention goes another way.
void MeasureDecoding(ModelRank& rank, SequenceId id, const Case& c, std::span<const Token> tokens,
                     std::span<float> logits, Result& result) {
  const auto step = [&](Token token) {
    const model::LlamaRank::Next next{id, token};
    rank.llama.Decode(std::span(&next, 1), logits);
  };
  rank.comm.ResetCounters();
  step(tokens[0]);  // a warm-up
  result.counters = MostOf(rank.comm, rank.comm.counters());
  const std::vector<float> first(logits.begin(), logits.end());
  for (const Token token : tokens) {
    result.seconds.push_back(TimeStep(rank.comm, [&] { step(token); }));
  }
  rank.llama.cache().Truncate(id, c.depth);
  rank.llama.Prefill(id, tokens.first(1), logits);
  if (rank.comm.rank() == 0) result.max_error = MaxError(first, logits);
}

// All at once; checked against the same in two parts.
void MeasurePrompt(ModelRank& rank, SequenceId id, const Case& c, std::span<const Token> tokens,
                   std::span<float> logits, Result& result) {
  constexpr int kRepeats = 3;
  for (int i = 0; i < kRepeats; ++i) {
    rank.llama.cache().Truncate(id, c.depth);
    Barrier(rank.comm);
    rank.comm.ResetCounters();
    result.seconds.push_back(TimeOnce([&] { rank.llama.Prefill(id, tokens, logits); }));
    result.counters = rank.comm.counters();
  }
  result.counters = MostOf(rank.comm, result.counters);
  const std::vector<float> whole(logits.begin(), logits.end());
  rank.llama.cache().Truncate(id, c.depth);
  if (tokens.size() > 1) rank.llama.Prefill(id, tokens.first(tokens.size() / 2), {});
  rank.llama.Prefill(id, tokens.subspan(tokens.size() / 2), logits);
  if (rank.comm.rank() == 0) result.max_error = MaxError(whole, logits);
}

Result Measure(ModelRun& run, ModelRank& rank, const Case& c, const Limits& limits) {
  Result result;
  KvCache& cache = rank.llama.cache();
  const SequenceId id = cache.Add(0);
  FillCache(cache, id, c.depth);
  const std::vector<Token> tokens = MakeTokens(c.tokens, run.model().shape().vocabulary);
  std::vector<float> logits(static_cast<std::size_t>(run.model().shape().vocabulary));
  rank.llama.set_schedule(c.schedule);
  if (c.decode) {
    MeasureDecoding(rank, id, c, tokens, logits, result);
    const double bytes = BytesRead(run, cache.options(), c.depth);
    result.limit_fraction = bytes / Median(result.seconds) / (limits.read_gbps * 1e9);
  } else {
    MeasurePrompt(rank, id, c, tokens, logits, result);
  }
  result.kv_bytes =
      static_cast<std::size_t>(cache.options().pages - cache.free_pages()) * cache.bytes_per_page();
  cache.Free(id);
  return result;
}

std::vector<Case> MakeCases(const Options& options) {
  std::vector<Case> cases;
  for (const std::int64_t depth : options.depths) {
    if (options.prompt > 0) {
      cases.push_back({.decode = false, .schedule = {}, .depth = depth, .tokens = options.prompt});
    }
    for (const std::string& schedule : options.schedules) {
      cases.push_back({.decode = true,
                       .schedule = ParseSchedule(schedule),
                       .depth = depth,
                       .tokens = options.tokens});
    }
  }
  return cases;
}

nlohmann::ordered_json ToJson(const Options& options, const ModelRun& run, const Case& c,
                              const Result& result) {
  const model::LlamaShape& shape = run.model().shape();
  const nlohmann::ordered_json none;
  return {{"case", "model"},
          {"phase", c.decode ? "decode" : "prefill"},
          {"schedule", c.decode ? nlohmann::ordered_json(Name(c.schedule)) : none},
          {"layout", "striped"},
          {"ranks", run.ranks()},
          {"threads", run.threads()},
          {"context", c.depth},
          {"tokens", c.tokens},
          {"heads", shape.heads},
          {"kv_heads", shape.kv_heads},
          {"head_dim", shape.head_dim},
          {"dtype", options.model.kv_type},
          {"isa", Name(DefaultIsa())},
          {"median_us", Median(result.seconds) * 1e6},
          {"min_us", *std::ranges::min_element(result.seconds) * 1e6},
          {"tokens_per_second", result.TokensPerSecond(c)},
          {"limit_fraction", c.decode ? nlohmann::ordered_json(result.limit_fraction) : none},
          {"bytes_sent_per_rank", result.counters.bytes},
          {"messages_per_rank", result.counters.messages},
          {"rounds", result.counters.rounds},
          {"peak_bytes_per_rank", result.kv_bytes},
          {"max_error", result.max_error},
          {"verified", result.max_error <= Bound(options)}};
}

void PrintHeader(const ModelRun& run, const Machine& machine, const Limits& limits) {
  std::printf("%s on %s, %d ranks x %d threads: reads %.1f GB/s, %.1f GFLOP/s\n",
              model::Printable(run.model().shape().name).c_str(), machine.cpu.c_str(), run.ranks(),
              run.threads(), limits.read_gbps, limits.fma_gflops);
  std::printf("%-8s %-10s %8s %7s %12s %10s %6s %10s %7s %9s\n", "phase", "schedule", "depth",
              "tokens", "a step", "tokens/s", "limit", "bytes", "rounds", "error");
}

void PrintRow(const Case& c, const Result& result, bool right) {
  char limit[16] = "-";
  if (c.decode) std::snprintf(limit, sizeof(limit), "%.2f", result.limit_fraction);
  std::printf(
      "%-8s %-10s %8lld %7lld %9.2f ms %10.1f %6s %10lld %7lld %9.1e  %s\n",
      c.decode ? "decode" : "prefill", c.decode ? std::string(Name(c.schedule)).c_str() : "-",
      static_cast<long long>(c.depth), static_cast<long long>(c.tokens),
      Median(result.seconds) * 1e3, result.TokensPerSecond(c), limit,
      static_cast<long long>(result.counters.bytes), static_cast<long long>(result.counters.rounds),
      result.max_error, right ? "ok" : "WRONG");
  std::fflush(stdout);
}

void Run(const Options& options) {
  ModelRun run(options.model);
  const std::vector<Case> cases = MakeCases(options);
  for (const Case& c : cases) run.Need(c.depth + c.tokens + (c.decode ? 1 : 0));
  Machine machine = DescribeMachine();
  machine.cores = HostCores();  // of which limits are
  ThreadPool pool = HostPool(std::min(RanksHere(run.ranks()) * run.threads(), machine.cores));
  const Limits limits = MeasureLimitsAlone({.pool = &pool}, [] {
    if (Communicator* comm = Processes()) Barrier(*comm);
  });
  const bool print = options.json != "-" && IsFirst();
  if (print) PrintHeader(run, machine, limits);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool wrong = false;
  run.Run(1, [&](ModelRank& rank) {
    for (const Case& c : cases) {
      const Result result = Measure(run, rank, c, limits);
      if (rank.comm.rank() != 0) continue;
      const bool right = result.max_error <= Bound(options);
      wrong = wrong || !right;
      rows.push_back(ToJson(options, run, c, result));
      if (print) PrintRow(c, result, right);
    }
  });
  if (!IsFirst()) return;
  WriteJson(options.json, {{"machine", ToJson(machine, DefaultIsa())},
                           {"limits", ToJson(limits)},
                           {"model", run.model().shape().name},
                           {"rows", rows}});
  if (wrong) throw CheckFailure("a step gave wrong logits; its row says how far they are off");
}

}  // namespace

void AddBenchModel(CLI::App& bench) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      bench.add_subcommand("model", "Prefill and decoding of a whole model, at several depths");
  AddModelOptions(*command, options->model);
  command->remove_option(command->get_option("--schedule"));
  command->add_option("--schedule", options->schedules, "How ranks share the attention of decoding")
      ->delimiter(',')
      ->check(CLI::IsMember(
          {"tree", "gather", "tree-3", "heads", "two-level", "ring-kv", "ring-q", "auto"}))
      ->capture_default_str()
      ->type_name("LIST");
  command->add_option("--depth", options->depths, "Tokens that are in the cache before")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 32))
      ->capture_default_str()
      ->type_name("LIST");
  command->add_option("--prefill", options->prompt, "Tokens to prefill; 0: none")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 32))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--tokens", options->tokens, "Tokens to decode")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str()
      ->type_name("N");
  AddJsonOption(*command, options->json);
  command->footer(
      "Tokens before have random keys and values, which are as fast to read as others. `limit` of "
      "decoding: the\nbytes of weights, keys and values that a token needs, over what memory "
      "delivers. Logits are checked: of decoding,\nagainst the token as a prompt of its own; of a "
      "prompt, against the same in two parts.\n\n"
      "Example:\n  treeline bench model -m model.gguf --ranks 2 --depth 0,8000");
  command->callback([options] { Run(*options); });
}

}  // namespace treeline::cli
