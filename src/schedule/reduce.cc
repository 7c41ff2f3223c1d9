// Reductions of partials over ranks. B tokens of H heads, N ranks, w = 4 * v_head_dim + 4 bytes a
// row.

#include "schedule/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "comm/subgroup.h"
#include "core/check.h"
#include "schedule/collectives/collectives.h"
#include "schedule/nodes.h"
#include "schedule/split.h"

namespace treeline {
namespace {

class Reduction {
 public:
  Reduction(Communicator& comm, Backend& backend, int heads, const PackedPartial& value)
      : comm_(comm),
        backend_(backend),
        heads_(static_cast<std::size_t>(heads)),
        value_(value),
        rows_(value.rows()),
        dim_(value.all().v_head_dim) {}

  void Tree() { Tree(comm_); }

  // Every rank sends its partial to every other; each merges all of them in the same order.
  void Gather(bool as_tree) {
    const std::size_t bytes = value_.bytes().size();
    const TrackedBuffer others =
        backend_.Allocate(bytes * Count(comm_.size() - 1), Purpose::kInFlight);
    std::vector<Partial> parts;
    std::vector<Bytes> receive;
    std::byte* next = others.data();
    for (int r = 0; r < comm_.size(); ++r) {
      if (r == comm_.rank()) {
        receive.emplace_back();
        parts.push_back(value_.all());
      } else {
        receive.emplace_back(next, bytes);
        parts.push_back(PartialAt(next, rows_, dim_));
        next += bytes;
      }
    }
    AllGather(comm_, {value_.bytes()}, receive);
    if (as_tree) {
      MergeAsTree(backend_, parts);
      if (comm_.rank() != 0) Copy(parts[0], value_.all());
    } else {
      backend_.Merge(parts, value_.all());
    }
  }

  // The maximum, then the denominator, then the numerator: three all-reduces, as the Tree Attention
  // paper has it. 4 * v_head_dim + 8 bytes a row in all.
  void Tree3() {
    const PackedPartial scratch(backend_, rows_, dim_, Purpose::kInFlight);
    const TrackedBuffer terms = backend_.Allocate(2 * rows_ * sizeof(float), Purpose::kWorkspace);
    const std::span<float> highest{reinterpret_cast<float*>(terms.data()), rows_};
    const std::span<float> total{highest.data() + rows_, rows_};
    const Partial value = value_.all();
    std::copy(value.lse.begin(), value.lse.end(), highest.begin());
    AllReduceFloats(highest, scratch, [](float a, float b) {
      return std::isnan(a) || std::isnan(b) ? std::nanf("") : std::max(a, b);
    });
    const auto dim = static_cast<std::size_t>(dim_);
    for (std::size_t row = 0; row < rows_; ++row) {
      // No key on any rank: all weights are 0, and -inf - -inf would be NaN.
      const float weight = highest[row] == kNoKeys ? 0.0f : std::exp(value.lse[row] - highest[row]);
      total[row] = weight;
      for (float& x : value.out.subspan(row * dim, dim)) x *= weight;
    }
    const auto add = [](float a, float b) { return a + b; };
    AllReduceFloats(total, scratch, add);
    AllReduceFloats(value.out, scratch, add);
    for (std::size_t row = 0; row < rows_; ++row) {
      value.lse[row] = Canonical(highest[row] + std::log(total[row]));
      if (total[row] == 0.0f) continue;  // no key: out is 0, lse -inf
      for (float& x : value.out.subspan(row * dim, dim)) x = Canonical(x / total[row]);
    }
  }

  // Each rank merges its share of the rows for all, then every rank gets every share.
  void Heads() {
    const int n = comm_.size();
    const Range own = Share(rows_, n, comm_.rank());
    const std::size_t own_bytes = PackedPartial::Bytes(own.size(), dim_);
    const TrackedBuffer in = backend_.Allocate(own_bytes * Count(n - 1), Purpose::kInFlight);
    std::vector<Pieces> send(Count(n));
    std::vector<Bytes> receive(Count(n));
    std::vector<Partial> parts;
    std::byte* next = in.data();
    for (int r = 0; r < n; ++r) {
      const Range share = Share(rows_, n, r);
      const auto pieces = PiecesOf(value_.Rows(share.begin, share.end));
      send[Count(r)].assign(pieces.begin(), pieces.end());
      if (r == comm_.rank()) {
        parts.push_back(value_.Rows(own.begin, own.end));
      } else {
        receive[Count(r)] = {next, own_bytes};
        parts.push_back(PartialAt(next, own.size(), dim_));
        next += own_bytes;
      }
    }
    AllToAll(comm_, send, receive);
    backend_.Merge(parts, value_.Rows(own.begin, own.end));
    Distribute([&](int r) { return Share(rows_, n, r); });
  }

  // Members send to the first rank of their node, the first ranks reduce by a tree, and send back.
  void TwoLevel(const Nodes& nodes) {
    const std::vector<int>& node = nodes.With(comm_.rank());
    Subgroup within(comm_, node);
    const std::size_t bytes = value_.bytes().size();
    const bool leads = comm_.rank() == node.front();
    const TrackedBuffer in =
        backend_.Allocate(leads ? bytes * (node.size() - 1) : 0, Purpose::kInFlight);
    std::vector<Bytes> receive(node.size());
    std::vector<Partial> parts{value_.all()};
    for (std::size_t i = 1; leads && i < node.size(); ++i) {
      std::byte* place = in.data() + (i - 1) * bytes;
      receive[i] = {place, bytes};
      parts.push_back(PartialAt(place, rows_, dim_));
    }
    GatherTo(within, 0, value_.bytes(), receive);
    if (leads) {
      backend_.Merge(parts, value_.all());
      Subgroup between(comm_, nodes.leaders());
      Tree(between);
    }
    Broadcast(within, 0, value_.bytes());
  }

  // Tokens are homed on ranks. The partial of a token's rows starts behind its home, takes in what
  // each rank has on its way round, and is complete when it comes home; its home sends it to all.
  void Chain() {
    const int n = comm_.size();
    const auto home = [&](int r) {
      const Range tokens = Share(rows_ / heads_, n, (r + n) % n);
      return Range{tokens.begin * heads_, tokens.end * heads_};
    };
    const int to = (comm_.rank() + 1) % n;
    const int from = (comm_.rank() + n - 1) % n;
    std::size_t most = 0;
    for (int r = 0; r < n; ++r) most = std::max(most, home(r).size());
    const PackedPartial scratch(backend_, most, dim_, Purpose::kInFlight);
    for (int step = 0; step < n - 1; ++step) {
      const Range out = home(comm_.rank() - 1 - step);
      const Range in = home(comm_.rank() - 2 - step + n);
      const auto pieces = PiecesOf(value_.Rows(out.begin, out.end));
      const Bytes receive = scratch.bytes().first(PackedPartial::Bytes(in.size(), dim_));
      comm_.Start({.send = pieces, .to = to, .receive = receive, .from = from})->Wait();
      const std::array<Partial, 2> parts{value_.Rows(in.begin, in.end),
                                         PartialAt(receive.data(), in.size(), dim_)};
      backend_.Merge(parts, parts[0]);
    }
    Distribute(home);
  }

 private:
  // Which NaN a sum of two has depends on their order, and that differs between ranks.
  static float Canonical(float x) { return std::isnan(x) ? std::nanf("") : x; }

  static std::size_t Count(int n) { return static_cast<std::size_t>(n); }

  void Tree(Communicator& comm) {
    if (comm.size() == 1) return;
    const PackedPartial scratch(backend_, rows_, dim_, Purpose::kInFlight);
    AllReduce(comm, value_.bytes(), scratch.bytes(), [&](Bytes, ConstBytes) {
      const std::array<Partial, 2> parts{value_.all(), scratch.all()};
      backend_.Merge(parts, value_.all());
    });
  }

  template <class Op>
  void AllReduceFloats(std::span<float> values, const PackedPartial& scratch, const Op& op) {
    const Bytes bytes = std::as_writable_bytes(values);
    AllReduce(comm_, bytes, scratch.bytes().first(bytes.size()), [&](Bytes, ConstBytes theirs) {
      const auto* other = reinterpret_cast<const float*>(theirs.data());
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = op(values[i], other[i]);
    });
  }

  // Every rank has finished the rows share(rank); afterwards all ranks have all rows.
  template <class ShareOf>
  void Distribute(const ShareOf& share) {
    const int n = comm_.size();
    const Range own = share(comm_.rank());
    const TrackedBuffer in =
        backend_.Allocate(PackedPartial::Bytes(rows_ - own.size(), dim_), Purpose::kInFlight);
    std::vector<Bytes> receive(Count(n));
    std::byte* next = in.data();
    for (int r = 0; r < n; ++r) {
      if (r == comm_.rank()) continue;
      receive[Count(r)] = {next, PackedPartial::Bytes(share(r).size(), dim_)};
      next += receive[Count(r)].size();
    }
    const auto pieces = PiecesOf(value_.Rows(own.begin, own.end));
    AllGather(comm_, {pieces.begin(), pieces.end()}, receive);
    for (int r = 0; r < n; ++r) {
      if (r == comm_.rank()) continue;
      const Range range = share(r);
      Copy(PartialAt(receive[Count(r)].data(), range.size(), dim_),
           value_.Rows(range.begin, range.end));
    }
  }

  Communicator& comm_;
  Backend& backend_;
  const std::size_t heads_;
  const PackedPartial& value_;
  const std::size_t rows_;
  const int dim_;
};

}  // namespace

void MergeAsTree(Backend& backend, std::span<const Partial> parts) {
  Require(std::has_single_bit(parts.size()), "a tree of ", parts.size(), " parts is not even");
  for (std::size_t distance = parts.size() / 2; distance > 0; distance /= 2) {
    for (std::size_t i = 0; i < distance; ++i) {
      const std::array<Partial, 2> pair{parts[i], parts[i + distance]};
      backend.Merge(pair, parts[i]);
    }
  }
}

void Reduce(Communicator& comm, Backend& backend, int heads, const PackedPartial& value,
            const DecodeOptions& options) {
  Reduction reduction(comm, backend, heads, value);
  switch (options.schedule) {
    case Schedule::kTree:
      return reduction.Tree();
    case Schedule::kGather:
      return reduction.Gather(options.reproducible);
    case Schedule::kTree3:
      return reduction.Tree3();
    case Schedule::kHeads:
      return reduction.Heads();
    case Schedule::kTwoLevel:
      return reduction.TwoLevel(Nodes(comm, options.node_size));
    case Schedule::kRingQ:
      return reduction.Chain();
    case Schedule::kRingKv:
    case Schedule::kAuto:
      break;
  }
  Throw<ArgumentError>("schedule ", Name(options.schedule), " does not reduce partials");
}

}  // namespace treeline
