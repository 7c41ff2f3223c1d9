// Random calls against a model that is obviously right.

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "cache/kv_testing.h"
#include "treeline/errors.h"
#include "treeline/kv_cache.h"

namespace treeline {
namespace {

using ::testing::AssertionResult;

using test::Group;
using test::Holds;
using test::SmallOptions;
using test::WriteSlots;

// Sequences as vectors of stamps, and pages as shared pointers, whose counts say what is shared.
class Model {
 public:
  struct Sequence {
    int first_rank;
    std::vector<std::int64_t> stamps;
    std::vector<std::vector<std::shared_ptr<int>>> pages;  // [rank][page]
  };

  explicit Model(const KvCacheOptions& options) : options_(options), group_(Group(options)) {}

  void Add(int first_rank) {
    SequenceId id{};
    for (KvCache& cache : group_) id = cache.Add(first_rank);
    sequences_[id] = {first_rank, {}, std::vector<std::vector<std::shared_ptr<int>>>(ranks())};
  }

  void Fork(SequenceId parent) {
    SequenceId id{};
    for (KvCache& cache : group_) id = cache.Fork(parent);
    sequences_[id] = sequences_.at(parent);
  }

  void Free(SequenceId id) {
    for (KvCache& cache : group_) cache.Free(id);
    sequences_.erase(id);
  }

  void Grow(SequenceId id, std::int64_t tokens) {
    Sequence& sequence = sequences_.at(id);
    const auto length = static_cast<std::int64_t>(sequence.stamps.size());
    std::vector<std::int64_t> needed;
    for (std::size_t r = 0; r < ranks(); ++r) {
      const std::int64_t had = Slots(sequence, r, length);
      const std::int64_t has = Slots(sequence, r, length + tokens);
      needed.push_back(Pages(has) - Pages(had));
      if (has > had && had % options_.page_slots != 0) needed[r] += Shared(sequence, r, had);
      RC_ASSERT(group_[r].PagesToGrow(id, tokens) == needed[r]);
    }
    if (!HaveFree(needed, [&](KvCache& cache) { cache.Grow(id, tokens); })) return;
    for (std::int64_t i = 0; i < tokens; ++i) sequence.stamps.push_back(++last_stamp_);
    for (std::size_t r = 0; r < ranks(); ++r) {
      const std::int64_t had = Slots(sequence, r, length);
      const std::int64_t has = Slots(sequence, r, length + tokens);
      if (has > had && had % options_.page_slots != 0) Unshare(sequence, r, had);
      while (std::ssize(sequence.pages[r]) < Pages(has)) {
        sequence.pages[r].push_back(std::make_shared<int>());
      }
      const SlotRange gained = group_[r].Grow(id, tokens);
      RC_ASSERT(gained == (SlotRange{had, has}));
      WriteSlots(group_[r], id, gained, sequence.stamps);
    }
  }

  // New tokens for positions [begin, end).
  void Rewrite(SequenceId id, std::int64_t begin, std::int64_t end) {
    Sequence& sequence = sequences_.at(id);
    const auto slots = [&](std::size_t r) {
      return SlotRange{Slots(sequence, r, begin), Slots(sequence, r, end)};
    };
    std::vector<std::int64_t> needed(ranks(), 0);
    for (std::size_t r = 0; r < ranks(); ++r) {
      if (slots(r).size() == 0) continue;
      for (std::int64_t page = slots(r).begin / options_.page_slots; page < Pages(slots(r).end);
           ++page) {
        needed[r] += Shared(sequence, r, page * options_.page_slots);
      }
    }
    std::vector<std::int64_t> stamps = sequence.stamps;
    for (std::int64_t p = begin; p < end; ++p) stamps[static_cast<std::size_t>(p)] = ++last_stamp_;
    if (!HaveFree(needed, [&](KvCache& cache) {
          WriteSlots(cache, id, slots(static_cast<std::size_t>(cache.options().rank)), stamps);
        })) {
      return;
    }
    sequence.stamps = stamps;
    for (std::size_t r = 0; r < ranks(); ++r) {
      for (std::int64_t slot = slots(r).begin; slot < slots(r).end; ++slot) {
        Unshare(sequence, r, slot);
      }
      WriteSlots(group_[r], id, slots(r), stamps);
    }
  }

  void Truncate(SequenceId id, std::int64_t length) {
    Sequence& sequence = sequences_.at(id);
    sequence.stamps.resize(static_cast<std::size_t>(length));
    for (std::size_t r = 0; r < ranks(); ++r) {
      sequence.pages[r].resize(static_cast<std::size_t>(Pages(Slots(sequence, r, length))));
      group_[r].Truncate(id, length);
    }
  }

  void Check() const {
    for (std::size_t r = 0; r < ranks(); ++r) {
      std::set<std::shared_ptr<int>> used;
      for (const auto& [id, sequence] : sequences_) {
        used.insert(sequence.pages[r].begin(), sequence.pages[r].end());
        const AssertionResult holds = Holds(group_[r], id, sequence.stamps);
        RC_LOG() << holds.message();
        RC_ASSERT(bool(holds));
        RC_ASSERT(group_[r].first_rank(id) == sequence.first_rank);
        RC_ASSERT(group_[r].positions(id).count() ==
                  Slots(sequence, r, static_cast<std::int64_t>(sequence.stamps.size())));
      }
      RC_ASSERT(group_[r].used_pages() == std::ssize(used));
      RC_ASSERT(group_[r].free_pages() == options_.pages - std::ssize(used));
    }
  }

  const std::map<SequenceId, Sequence>& sequences() const { return sequences_; }

 private:
  std::size_t ranks() const { return group_.size(); }

  std::int64_t Pages(std::int64_t slots) const {
    return slots / options_.page_slots + (slots % options_.page_slots != 0 ? 1 : 0);
  }

  // Positions below `length` that live on the rank.
  std::int64_t Slots(const Sequence& sequence, std::size_t rank, std::int64_t length) const {
    std::int64_t slots = 0;
    for (std::int64_t p = 0; p < length; ++p) {
      const std::int64_t owner = (sequence.first_rank + p / options_.run) % options_.ranks;
      slots += owner == static_cast<std::int64_t>(rank) ? 1 : 0;
    }
    return slots;
  }

  std::shared_ptr<int>& PageAt(Sequence& sequence, std::size_t rank, std::int64_t slot) const {
    return sequence.pages[rank].at(static_cast<std::size_t>(slot / options_.page_slots));
  }

  int Shared(Sequence& sequence, std::size_t rank, std::int64_t slot) const {
    return PageAt(sequence, rank, slot).use_count() > 1 ? 1 : 0;
  }

  void Unshare(Sequence& sequence, std::size_t rank, std::int64_t slot) const {
    if (Shared(sequence, rank, slot) != 0) {
      PageAt(sequence, rank, slot) = std::make_shared<int>();
    }
  }

  // Whether every rank has the pages it needs. A rank that has not refuses, and Check() sees that
  // nothing changed.
  template <class Action>
  bool HaveFree(const std::vector<std::int64_t>& needed, const Action& action) {
    bool all = true;
    for (std::size_t r = 0; r < ranks(); ++r) {
      if (needed[r] <= group_[r].free_pages()) continue;
      RC_ASSERT_THROWS_AS(action(group_[r]), ArgumentError);
      all = false;
    }
    return all;
  }

  KvCacheOptions options_;
  std::deque<KvCache> group_;
  std::map<SequenceId, Sequence> sequences_;
  std::int64_t last_stamp_ = 0;
};

RC_GTEST_PROP(KvModelProperty, BehavesLikeVectorsOfTokens, ()) {
  const auto uniform = [](int begin, int end) {
    return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange(begin, end));
  };
  KvCacheOptions options = SmallOptions();
  options.ranks = uniform(1, 5);
  options.run = uniform(1, 4);
  options.page_slots = 1 << uniform(0, 4);
  options.pages = uniform(1, 24);
  options.kv_heads = uniform(1, 3);
  options.dtype = kAllDTypes[uniform(0, 4)];
  Model model(options);
  // What to do, to which sequence, and two numbers.
  using Step = std::tuple<int, int, int, int>;
  const auto number = rc::gen::resize(rc::kNominalSize, rc::gen::inRange(0, 1000));
  const auto steps = *rc::gen::resize(
      60, rc::gen::container<std::vector<Step>>(rc::gen::tuple(number, number, number, number)));
  for (const auto& [action, which, x, y] : steps) {
    const auto& sequences = model.sequences();
    if (sequences.empty() || action % 10 == 0) {
      model.Add(x % options.ranks);
      model.Check();
      continue;
    }
    const auto chosen = std::next(sequences.begin(), which % std::ssize(sequences));
    const SequenceId id = chosen->first;
    const auto length = static_cast<std::int64_t>(chosen->second.stamps.size());
    switch (action % 10) {
      case 1:
      case 2:
        model.Fork(id);
        break;
      case 3:
        model.Free(id);
        break;
      case 4:
        model.Truncate(id, x % (length + 1));
        break;
      case 5:
      case 6: {
        const std::int64_t begin = x % (length + 1);
        model.Rewrite(id, begin, begin + y % (length - begin + 1));
        break;
      }
      default:
        model.Grow(id, x % (y % 2 == 0 ? 4 : 40));
    }
    model.Check();
  }
}

}  // namespace
}  // namespace treeline
