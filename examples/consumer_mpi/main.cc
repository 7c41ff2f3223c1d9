// Attention of one query over keys of which each process holds some. All keys score 0, so the
// output is the mean of the values, which are the keys' positions, and lse the log of their number.
#include <treeline/mpi.h>
#include <treeline/schedule.h>

#include <cmath>
#include <cstdio>
#include <vector>

// Decodes over the ranks of `comm`; returns whether this rank got the right answer.
static bool Decode(MPI_Comm comm) {
  using namespace treeline;
  constexpr int kTokens = 1001;
  const auto ranks = MakeMpiCommunicator(comm);
  const AttentionSpec spec = AttentionSpec::Make(/*heads=*/1, /*kv_heads=*/1, /*head_dim=*/8);
  const Layout layout = Layout::Striped(kTokens, ranks->size());
  std::vector<Positions> shards;
  for (int r = 0; r < ranks->size(); ++r) shards.push_back(layout.Shard(r));
  const Positions& own = shards[static_cast<std::size_t>(ranks->rank())];
  std::vector<float> q(8), k(static_cast<std::size_t>(own.count()) * 8), v(k.size()), out(8),
      lse(1);
  for (std::size_t i = 0; i < v.size(); ++i) {
    v[i] = static_cast<float>(own[static_cast<std::int64_t>(i / 8)]);
  }
  const auto rows = [&](const std::vector<float>& x) {
    return TensorView::Dense(x.data(), DType::kF32, static_cast<std::int64_t>(x.size() / 8), 1, 8);
  };
  const ShardedTask task{.local = {.q = rows(q),
                                   .q_positions = Positions::Contiguous(kTokens - 1, 1),
                                   .kv = KvView::Strided(rows(k), rows(v)),
                                   .kv_positions = own,
                                   .result = {out, lse, 8}},
                         .kv_shards = shards};
  CpuBackend backend({.poll = ProgressOf(*ranks)});
  treeline::Decode(*ranks, backend, spec, {&task, 1}, {.schedule = Schedule::kTree});
  if (ranks->rank() == 0) std::printf("out[0] = %g (expected %d)\n", out[0], kTokens / 2);
  return std::fabs(out[0] - kTokens / 2) < 1e-3f && std::fabs(lse[0] - std::log(1001.0f)) < 1e-4f;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm own = MPI_COMM_NULL;  // the program's, whatever it is
  MPI_Comm_dup(MPI_COMM_WORLD, &own);
  const bool right = Decode(own);
  MPI_Comm_free(&own);
  MPI_Finalize();
  return right ? 0 : 1;
}
