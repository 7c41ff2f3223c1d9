// Schedules when something goes wrong on one rank: every rank gets an error, none waits for ever,
// and the next group works.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/deal.h"
#include "cli/rank_check.h"
#include "comm/rank_outcomes.h"
#include "schedule/disturbed_communicator.h"

namespace treeline::test {
namespace {

using ::testing::HasSubstr;
using Kind = RankOutcome::Kind;

std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

// What a rank asks for. All ranks must ask for the same.
struct Call {
  enum What : unsigned { kDecode = 1, kReduce = 2, kPrefill = 4, kBackward = 8 };
  What what = kDecode;
  AttentionSpec spec;
  DecodeOptions options = {};
  std::int64_t rows = 2;   // query tokens of kDecode and kReduce
  std::int64_t keys = 11;  // tokens of the sequence
  int sequences = 2;
  LayoutKind layout = LayoutKind::kStriped;
  DType kv_dtype = DType::kF32;
  bool with_shards = true;  // else the positions of all ranks are missing
  int d_sinks = 0;
};

// Makes the call, with inputs of 0: only who waits for whom is of interest.
void Make(const Call& call, Communicator& comm) {
  const AttentionSpec& spec = call.spec;
  CpuBackend backend;
  if (call.what == Call::kReduce) {
    std::vector<float> lse(Index(call.rows * spec.heads));
    std::vector<float> out(lse.size() * Index(spec.v_head_dim));
    return ReducePartial(comm, backend, spec.heads, {out, lse, spec.v_head_dim}, call.options);
  }
  std::vector<Positions> shards;
  for (int r = 0; r < comm.size(); ++r) {
    shards.push_back(cli::MakeLayout(call.layout, call.keys, comm.size()).Shard(r));
  }
  const Positions own = shards[Index(comm.rank())];
  if (!call.with_shards) shards.clear();
  const bool decodes = call.what == Call::kDecode;
  const Positions rows = decodes ? Positions::Contiguous(call.keys, call.rows) : own;
  // Enough for any input; K and V are not written to, so that sequences may share them.
  const std::vector<float> zeros(Index((call.keys + call.rows) * spec.heads * 64));
  const auto tensor = [&](DType dtype, const Positions& positions, int heads, int dim) {
    return TensorView::Dense(zeros.data(), dtype, positions.count(), heads, dim);
  };
  const TensorView q = tensor(DType::kF32, rows, spec.heads, spec.head_dim);
  const KvView kv = KvView::Strided(tensor(call.kv_dtype, own, spec.kv_heads, spec.head_dim),
                                    tensor(call.kv_dtype, own, spec.kv_heads, spec.v_head_dim));
  std::vector<std::vector<float>> results;
  const auto floats = [&](std::int64_t count) {
    return std::span<float>(results.emplace_back(Index(count)));
  };
  if (call.what == Call::kBackward) {
    std::vector<ShardedBackwardTask> tasks;
    const TensorView out = tensor(DType::kF32, rows, spec.heads, spec.v_head_dim);
    const auto grads = [&](const Positions& positions, int heads, int dim) {
      float* data = floats(positions.count() * heads * dim).data();
      return GradView::Dense(data, positions.count(), heads, dim);
    };
    for (int i = 0; i < call.sequences; ++i) {
      tasks.push_back({.local = {.q = q,
                                 .q_positions = rows,
                                 .kv = kv,
                                 .kv_positions = own,
                                 .out = out,
                                 .d_out = out,
                                 .lse = {zeros.data(), Index(rows.count() * spec.heads)},
                                 .dq = grads(rows, spec.heads, spec.head_dim),
                                 .dk = grads(own, spec.kv_heads, spec.head_dim),
                                 .dv = grads(own, spec.kv_heads, spec.v_head_dim)},
                       .kv_shards = shards});
    }
    return PrefillBackward(comm, backend, spec, tasks, floats(call.d_sinks));
  }
  std::vector<ShardedTask> tasks;
  for (int i = 0; i < call.sequences; ++i) {
    const std::span<float> out = floats(rows.count() * spec.heads * spec.v_head_dim);
    const std::span<float> lse = floats(rows.count() * spec.heads);
    tasks.push_back({.local = {.q = q,
                               .q_positions = rows,
                               .kv = kv,
                               .kv_positions = own,
                               .result = {out, lse, spec.v_head_dim}},
                     .kv_shards = shards,
                     .q_shards = shards});
  }
  if (decodes) return Decode(comm, backend, spec, tasks, call.options);
  Prefill(comm, backend, spec, tasks, call.options.schedule);
}

AttentionSpec BaseSpec() {
  AttentionSpec spec = AttentionSpec::Make(2, 1, 8);
  spec.sinks = {0.5f, 0.25f};
  return spec;
}

// Every schedule of every call.
std::vector<Call> AllCalls() {
  std::vector<Call> calls;
  for (const Schedule schedule : kDecodeSchedules) {
    calls.push_back({.what = Call::kDecode,
                     .spec = BaseSpec(),
                     .options = {.schedule = schedule, .node_size = 2}});
    if (schedule == Schedule::kRingKv) continue;
    calls.push_back({.what = Call::kReduce,
                     .spec = BaseSpec(),
                     .options = {.schedule = schedule, .node_size = 2}});
  }
  calls.push_back({.what = Call::kDecode,
                   .spec = BaseSpec(),
                   .options = {.schedule = Schedule::kAuto, .node_size = 2}});
  for (const Schedule schedule : {Schedule::kRingKv, Schedule::kRingQ}) {
    calls.push_back(
        {.what = Call::kPrefill, .spec = BaseSpec(), .options = {.schedule = schedule}});
  }
  calls.push_back({.what = Call::kBackward, .spec = BaseSpec(), .d_sinks = 2});
  return calls;
}

std::string NameOf(const Call& call) {
  const char* const name = call.what == Call::kDecode    ? "decode "
                           : call.what == Call::kReduce  ? "reduce "
                           : call.what == Call::kPrefill ? "prefill "
                                                         : "backward ";
  return name + std::string(Name(call.options.schedule));
}

// The process goes on: a group made now computes what it should.
void ExpectNextDecodeIsExact(int ranks) {
  cli::ProblemShape shape;
  shape.spec = BaseSpec();
  shape.sequences.push_back({Positions::Contiguous(8, 1), Positions::Contiguous(0, 9)});
  cli::RankProblem problem(shape);
  for (const Schedule schedule : kDecodeSchedules) {
    const cli::RankReport report =
        problem.Decode({.ranks = {.ranks = ranks, .timeout = kLong}}, {.schedule = schedule});
    EXPECT_LE(report.max_error, 1e-5);
    EXPECT_TRUE(report.same_bits);
  }
}

constexpr unsigned kAll = Call::kDecode | Call::kReduce | Call::kPrefill | Call::kBackward;
constexpr unsigned kAttention = Call::kDecode | Call::kPrefill | Call::kBackward;

// What one rank's call has other than the others'.
struct Difference {
  const char* name;
  unsigned calls;  // to which it matters
  void (*apply)(Call&);
};

const Difference kDifferences[] = {
    {"rows", Call::kDecode | Call::kReduce, [](Call& c) { c.rows = 3; }},
    {"heads", kAll,
     [](Call& c) {
       c.spec = AttentionSpec::Make(3, 1, 8);
       c.d_sinks = 0;
     }},
    {"v_head_dim", kAll, [](Call& c) { c.spec.v_head_dim = 16; }},
    {"head_dim", kAttention, [](Call& c) { c.spec.head_dim = 16; }},
    {"kv_heads", kAttention, [](Call& c) { c.spec.kv_heads = 2; }},
    {"scale", kAttention, [](Call& c) { c.spec.scale = 2.0f; }},
    {"causal", kAttention, [](Call& c) { c.spec.causal = true; }},
    {"window", kAttention, [](Call& c) { c.spec.window = 3; }},
    {"softcap", kAttention, [](Call& c) { c.spec.softcap = 3.0f; }},
    {"bf16_terms", kAttention, [](Call& c) { c.spec.bf16_terms = 2; }},
    {"int8_queries", kAttention, [](Call& c) { c.spec.int8_queries = true; }},
    {"sinks", kAttention, [](Call& c) { c.spec.sinks[1] = 0.0f; }},
    {"slopes instead of sinks", kAttention,
     [](Call& c) {
       c.spec.alibi_slopes.swap(c.spec.sinks);
       c.d_sinks = 0;
     }},
    {"d_sinks", Call::kBackward, [](Call& c) { c.d_sinks = 0; }},
    {"kv dtype", kAttention, [](Call& c) { c.kv_dtype = DType::kBF16; }},
    {"keys", kAttention, [](Call& c) { c.keys = 12; }},
    {"sequences", kAttention, [](Call& c) { c.sequences = 1; }},
    {"layout", kAttention, [](Call& c) { c.layout = LayoutKind::kContiguous; }},
    {"node_size", Call::kDecode | Call::kReduce, [](Call& c) { c.options.node_size = 3; }},
    {"reproducible", Call::kDecode | Call::kReduce, [](Call& c) { c.options.reproducible = true; }},
    {"schedule", Call::kDecode | Call::kReduce | Call::kPrefill,
     [](Call& c) {
       const bool ring_q = c.options.schedule == Schedule::kRingQ;
       const bool ring_kv = c.options.schedule == Schedule::kRingKv;
       const bool tree = c.options.schedule == Schedule::kTree;
       c.options.schedule = ring_q    ? Schedule::kRingKv
                            : ring_kv ? Schedule::kRingQ
                            : tree    ? Schedule::kHeads
                                      : Schedule::kTree;
     }},
    {"call", kAll,
     [](Call& c) {
       c.what = c.what == Call::kPrefill ? Call::kBackward : Call::kPrefill;
       c.options.schedule = Schedule::kRingKv;
     }},
};

class FaultTest : public testing::TestWithParam<int> {
 protected:
  const int n_ = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Ranks, FaultTest, testing::Values(2, 3, 5, 8),
                         testing::PrintToStringParamName());

// Two ranks meet in their first message, whatever they do; several may have to wait for the end of
// the timeout.
TEST_P(FaultTest, ACallThatDiffersOnOneRankIsAnErrorOnAll) {
  const std::chrono::milliseconds timeout = n_ == 2 ? kLong : 100ms;
  int odd = 0;
  for (const Call& call : AllCalls()) {
    for (const Difference& difference : kDifferences) {
      if ((difference.calls & call.what) == 0) continue;
      SCOPED_TRACE(NameOf(call) + ", " + difference.name);
      odd = (odd + 1) % n_;
      Call other = call;
      difference.apply(other);
      const Outcomes outcomes =
          RunAndRecord({.ranks = n_, .timeout = timeout},
                       [&](Communicator& comm) { Make(comm.rank() == odd ? other : call, comm); });
      for (int rank = 0; rank < n_; ++rank) {
        SCOPED_TRACE(rank);
        EXPECT_LT(outcomes[rank].after, kAtOnce);
        if (outcomes[rank].kind == Kind::kArgumentError) {
          EXPECT_EQ(rank, odd);  // it can see the mistake itself
        } else {
          EXPECT_EQ(outcomes[rank].kind, Kind::kCommError);
          EXPECT_THAT(outcomes[rank].what, HasSubstr("rank"));
        }
      }
      EXPECT_TRUE(outcomes.thrown);
    }
  }
  ExpectNextDecodeIsExact(n_);
}

TEST_P(FaultTest, WithoutADifferenceEveryCallReturns) {
  for (const Call& call : AllCalls()) {
    SCOPED_TRACE(NameOf(call));
    const Outcomes outcomes = RunAndRecord({.ranks = n_, .timeout = kLong},
                                           [&](Communicator& comm) { Make(call, comm); });
    for (const RankOutcome& outcome : outcomes.ranks) EXPECT_EQ(outcome.kind, Kind::kReturned);
  }
}

TEST_P(FaultTest, AnArgumentErrorOfOneRankIsToldToAllAtOnce) {
  const int wrong = n_ - 1;
  for (const Call& call : AllCalls()) {
    if (call.what == Call::kReduce) continue;  // has no shards
    SCOPED_TRACE(NameOf(call));
    const Outcomes outcomes =
        RunAndRecord({.ranks = n_, .timeout = kLong}, [&](Communicator& comm) {
          Call mine = call;
          mine.with_shards = comm.rank() != wrong;
          Make(mine, comm);
        });
    EXPECT_EQ(outcomes[wrong].kind, Kind::kArgumentError);
    ExpectThrown<ArgumentError>(outcomes, outcomes[wrong].what);
    for (int rank = 0; rank < wrong; ++rank) {
      EXPECT_LT(outcomes[rank].after, kAtOnce);
      EXPECT_EQ(outcomes[rank].kind, Kind::kCommError);
      EXPECT_EQ(outcomes[rank].what,
                "rank " + std::to_string(wrong) + " failed: " + outcomes[wrong].what);
    }
  }
  ExpectNextDecodeIsExact(n_);
}

TEST_P(FaultTest, ARankThatDoesNotCallIsMissedInTime) {
  int absent = 0;
  for (const std::chrono::milliseconds timeout : {1ms, 50ms}) {
    for (const Call& call : AllCalls()) {
      SCOPED_TRACE(NameOf(call));
      absent = (absent + 1) % n_;
      const Outcomes outcomes =
          RunAndRecord({.ranks = n_, .timeout = timeout}, [&](Communicator& comm) {
            if (comm.rank() != absent) Make(call, comm);
          });
      const std::string& what = outcomes[(absent + 1) % n_].what;
      const std::string step = call.what == Call::kDecode    ? "(choose|decode)"
                               : call.what == Call::kReduce  ? "merge"
                               : call.what == Call::kPrefill ? "prefill"
                                                             : "prefill backward";
      EXPECT_THAT(what, testing::MatchesRegex("rank [0-9] failed: it waited " +
                                              std::string(timeout == 1ms ? "0.001" : "0.05") +
                                              " s for rank [0-9] in step " + step));
      for (int rank = 0; rank < n_; ++rank) {
        EXPECT_LT(outcomes[rank].after, kAtOnce);
        if (rank == absent) continue;
        EXPECT_EQ(outcomes[rank].kind, Kind::kCommError);
        EXPECT_EQ(outcomes[rank].what, what);
      }
      ExpectThrown<CommError>(outcomes, what);
    }
  }
  ExpectNextDecodeIsExact(n_);
}

struct Injected : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One rank throws at its first call of the communicator, at its second, and so on: also between
// Start and Wait, with buffers on their way, which are freed.
void ExpectAllLearnOfAThrow(const Call& call, int ranks, int failing) {
  bool reached = true;
  for (int fail_at = 0; reached; ++fail_at) {
    SCOPED_TRACE(NameOf(call) + ", call " + std::to_string(fail_at));
    const bool standard = fail_at % 3 != 2;
    reached = false;
    const Outcomes outcomes =
        RunAndRecord({.ranks = ranks, .timeout = kLong}, [&](Communicator& comm) {
          Disturbance disturbance{.seed = static_cast<unsigned>(fail_at), .delay_percent = 10};
          if (comm.rank() == failing) {
            disturbance.fail_at = fail_at;
            disturbance.fail = [&] {
              reached = true;
              if (standard) throw Injected("it was told to");
              throw 'x';
            };
          }
          DisturbedCommunicator disturbed(comm, disturbance);
          Make(call, disturbed);
        });
    const std::string what = "rank " + std::to_string(failing) +
                             " failed: " + (standard ? "it was told to" : "an unknown exception");
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_LT(outcomes[rank].after, kAtOnce);
      if (!reached) {
        EXPECT_EQ(outcomes[rank].kind, Kind::kReturned);
      } else if (rank == failing) {
        EXPECT_EQ(outcomes[rank].kind, Kind::kOther);
      } else if (outcomes[rank].kind != Kind::kReturned || fail_at == 0) {
        // Late in a schedule, a rank may have had all it needed.
        EXPECT_EQ(outcomes[rank].kind, Kind::kCommError);
        EXPECT_EQ(outcomes[rank].what, what);
      }
    }
    if (!reached) {
      EXPECT_FALSE(outcomes.thrown);
    } else if (standard) {
      ExpectThrown<Injected>(outcomes, "it was told to");
    } else {
      ASSERT_TRUE(outcomes.thrown);
      EXPECT_THROW(std::rethrow_exception(outcomes.thrown), char);
    }
  }
}

TEST_P(FaultTest, ARankMayThrowAnywhere) {
  for (const Call& call : AllCalls()) {
    for (const int failing : {0, n_ - 1}) ExpectAllLearnOfAThrow(call, n_, failing);
  }
  ExpectNextDecodeIsExact(n_);
}

// The same without RunRanks: the schedule itself tells the others, whatever was thrown.
template <class Thrown>
void ExpectScheduleTells(const Call& call, int ranks, const Thrown& thrown) {
  SCOPED_TRACE(NameOf(call));
  ThreadGroup group({.ranks = ranks, .timeout = kLong});
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      DisturbedCommunicator comm(group.rank(rank),
                                 {.fail_at = rank == 0 ? 0 : -1, .fail = [&] { throw thrown; }});
      if (rank == 0) {
        EXPECT_THROW(Make(call, comm), Thrown);
      } else {
        EXPECT_THROW(Make(call, comm), CommError);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(group.failed_rank(), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - start, kAtOnce);
}

TEST_P(FaultTest, AScheduleTellsTheOthersWhatItThrows) {
  for (const Call& call : AllCalls()) {
    ExpectScheduleTells(call, n_, Injected("it was told to"));
    ExpectScheduleTells(call, n_, 'x');
  }
}

}  // namespace
}  // namespace treeline::test
