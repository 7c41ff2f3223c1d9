#include "model/saved_context.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "core/check.h"
#include "model/context_manifest.h"
#include "model/durable_file.h"
#include "model/mapped_file.h"
#include "model/work_together.h"
#include "schedule/collective_call.h"
#include "schedule/collectives/collectives.h"

namespace treeline::model {
namespace {

namespace fs = std::filesystem;

std::string ReadManifest(const fs::path& path) {
  constexpr std::size_t kMost = std::size_t{1} << 30;
  const MappedFile file(path.string());
  if (file.bytes().size() > kMost) {
    Throw<FormatError>("'", path.string(), "' has ", file.bytes().size(), " bytes; at most ", kMost,
                       " are read");
  }
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

// Names of the files of one save.
class FileNames {
 public:
  FileNames(const fs::path& folder, std::uint64_t number) : folder_(folder), number_(Hex(number)) {}

  std::string ShardName(int rank) const {
    return "shard-" + std::to_string(rank) + "-" + number_ + ".kv";
  }
  fs::path Shard(int rank) const { return folder_ / ShardName(rank); }
  // The manifest before it replaces another.
  fs::path Part() const { return folder_ / ("context-" + number_ + ".part"); }
  static bool IsPart(const std::string& name) {
    return name.starts_with("context-") && name.ends_with(".part");
  }

 private:
  const fs::path folder_;
  const std::string number_;
};

// Removes what is not of the folder's context: files of earlier ones, and of saves that were
// killed. Nothing, if the context cannot be read: it may be of a later version.
void RemoveStrays(const fs::path& folder) {
  const fs::path path = folder / kManifestName;
  std::set<std::string> used;
  std::error_code error;
  if (fs::exists(path, error)) {
    try {
      const ContextManifest manifest = ParseManifest(ReadManifest(path), path.string());
      for (const ContextManifest::Shard& shard : manifest.shards) used.insert(shard.file);
    } catch (const FormatError&) {
      return;
    }
  }
  if (error) return;
  std::error_code ignored;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool stray = IsShardName(name) ? !used.contains(name) : FileNames::IsPart(name);
    if (stray) fs::remove(entry->path(), ignored);
  }
}

std::size_t SlotBytes(const KvCacheOptions& o) {
  return static_cast<std::size_t>(o.kv_heads) *
         (RowBytes(o.dtype, o.head_dim) + RowBytes(o.dtype, o.v_head_dim));
}

std::size_t ShardBytes(const KvCacheOptions& o, const Positions& positions) {
  return static_cast<std::size_t>(positions.count()) * SlotBytes(o) *
         static_cast<std::size_t>(o.layers);
}

std::size_t Blocks(std::size_t bytes) { return (bytes + kContextBlock - 1) / kContextBlock; }

// Writes bytes in blocks, and takes their checksums.
class BlockWriter {
 public:
  explicit BlockWriter(NewFile& file) : file_(file) { block_.reserve(kContextBlock); }

  void Add(ConstBytes bytes) {
    while (!bytes.empty()) {
      const std::size_t count = std::min(bytes.size(), kContextBlock - block_.size());
      block_.insert(block_.end(), bytes.begin(),
                    bytes.begin() + static_cast<std::ptrdiff_t>(count));
      bytes = bytes.subspan(count);
      if (block_.size() == kContextBlock) Flush();
    }
  }
  std::vector<std::uint64_t> Finish() {
    if (!block_.empty()) Flush();
    return std::move(checksums_);
  }

 private:
  void Flush() {
    checksums_.push_back(ContextChecksum(block_));
    file_.Write(block_);
    block_.clear();
  }

  NewFile& file_;
  std::vector<std::byte> block_;
  std::vector<std::uint64_t> checksums_;
};

// Writes a rank's keys and values, [layer, K and V, slot, kv_head, row]; returns their checksums.
std::vector<std::uint64_t> WriteShard(const KvCache& cache, SequenceId id, NewFile& file,
                                      const Stop& stop) {
  const KvCacheOptions& o = cache.options();
  file.Create();
  BlockWriter writer(file);
  for (int layer = 0; layer < o.layers; ++layer) {
    const KvView view = cache.View(id, layer);
    for (const KvSide* side : {&view.k, &view.v}) {
      const std::size_t row = RowBytes(o.dtype, side->dim);
      for (std::int64_t slot = 0; slot < view.slots; ++slot) {
        if (stop) return {};
        for (int head = 0; head < o.kv_heads; ++head) {
          writer.Add({side->Row(slot, head, view.page_slots), row});
        }
      }
    }
  }
  std::vector<std::uint64_t> checksums = writer.Finish();
  file.Close();
  return checksums;
}

// One rank's part of a save, step by step; each is collective.
class ContextWriter {
 public:
  // `number` is one that no earlier files have. The cache must not change.
  ContextWriter(Communicator& comm, const KvCache& cache, SequenceId id, const fs::path& folder,
                std::uint64_t number)
      : comm_(comm),
        cache_(cache),
        id_(id),
        folder_(folder),
        names_(folder, number),
        shard_(names_.Shard(comm.rank())),
        part_(names_.Part()) {}

  // Makes the folder, and keeps other saves away from it until the end.
  void LockFolder() {
    WorkTogether(comm_, [&](const Stop& stop) {
      if (!IsFirst()) return;
      MakeFolder(folder_);
      lock_.emplace(folder_, stop);
      if (!stop) RemoveStrays(folder_);
    });
  }

  // Returns the shards of all ranks, on rank 0; checksums of others are 0 elsewhere.
  std::vector<ContextManifest::Shard> WriteShards() {
    std::vector<std::uint64_t> own;
    WorkTogether(
        comm_,
        [&](const Stop& stop) {
          std::error_code error;
          if (!fs::is_directory(folder_, error)) {
            Throw<FormatError>("'", folder_.string(), "' is not there for rank ", comm_.rank(),
                               ": the folder must be shared by all hosts");
          }
          own = WriteShard(cache_, id_, shard_, stop);
        },
        [&] { shard_.Remove(); });
    // Once rank 0 has the checksums, a rank that loses the group does not know whether its shard is
    // in use.
    shard_.Keep();
    std::vector<ContextManifest::Shard> shards;
    RunCollective(comm_, [&] { shards = Gather(std::move(own)); });
    return shards;
  }

  // Replaces the folder's context.
  void Publish(const ContextManifest& manifest) {
    WorkTogether(
        comm_,
        [&](const Stop&) {
          if (!IsFirst()) return;
          RequireShards();
          const std::string text = FormatManifest(manifest);
          part_.Create();
          part_.Write(std::as_bytes(std::span(text)));
          part_.Close();
          SyncFolder(folder_);
          const fs::path target = folder_ / kManifestName;
          if (std::rename(part_.path().c_str(), target.c_str()) != 0) FailToWrite(target);
          part_.Keep();
        },
        [&] {
          shard_.Remove();
          part_.Remove();
        });
  }

  // Removes files of the context that was replaced, once no crash can bring it back.
  void RemoveReplaced() {
    WorkTogether(comm_, [&](const Stop&) {
      if (!IsFirst()) return;
      SyncFolder(folder_);
      RemoveStrays(folder_);
    });
  }

 private:
  bool IsFirst() const { return comm_.rank() == 0; }

  std::vector<ContextManifest::Shard> Gather(std::vector<std::uint64_t> own) {
    std::vector<ContextManifest::Shard> shards;
    for (const Positions& positions : cache_.shards(id_)) {
      const std::size_t blocks = Blocks(ShardBytes(cache_.options(), positions));
      shards.push_back(
          {names_.ShardName(static_cast<int>(shards.size())), std::vector<std::uint64_t>(blocks)});
    }
    const auto self = static_cast<std::size_t>(comm_.rank());
    shards[self].checksums = std::move(own);
    std::vector<Bytes> parts;
    parts.reserve(shards.size());
    for (ContextManifest::Shard& shard : shards) {
      parts.push_back(std::as_writable_bytes(std::span(shard.checksums)));
    }
    GatherTo(comm_, 0, parts[self], parts);
    return shards;
  }

  // Throws FormatError unless rank 0 finds what the others have written.
  void RequireShards() const {
    int rank = 0;
    for (const Positions& positions : cache_.shards(id_)) {
      const fs::path path = names_.Shard(rank);
      std::error_code error;
      const std::uintmax_t bytes = fs::file_size(path, error);
      if (error || bytes != ShardBytes(cache_.options(), positions)) {
        Throw<FormatError>("'", path.string(), "', which rank ", rank, " has written, ",
                           error ? "is not there" : "has another size",
                           " for rank 0: the folder must be shared by all hosts");
      }
      ++rank;
    }
  }

  Communicator& comm_;
  const KvCache& cache_;
  const SequenceId id_;
  const fs::path folder_;
  const FileNames names_;
  std::optional<FolderLock> lock_;  // on rank 0
  NewFile shard_;
  NewFile part_;  // on rank 0
};

std::uint64_t RandomNumber() {
  std::random_device random;
  return (std::uint64_t{random()} << 32) | random();
}

// The files of a context that was saved, and where rows lie in them.
class SavedShards {
 public:
  // Throws FormatError unless all are there, with their sizes.
  SavedShards(const ContextManifest& manifest, const KvCacheOptions& options,
              const fs::path& folder)
      : options_(options),
        layout_(Layout::Striped(static_cast<std::int64_t>(manifest.tokens.size()),
                                static_cast<int>(manifest.shards.size()), 1, manifest.first_rank)) {
    for (int r = 0; r < layout_.ranks(); ++r) {
      const ContextManifest::Shard& shard = manifest.shards[static_cast<std::size_t>(r)];
      const std::string path = (folder / shard.file).string();
      auto file = std::make_unique<MappedFile>(path);
      const Positions positions = layout_.Shard(r);
      const std::size_t bytes = file->bytes().size();
      const std::size_t expected = ShardBytes(options_, positions);
      if (bytes != expected) {
        Throw<FormatError>("'", path, "' has ", bytes, " bytes; it should have ", expected);
      }
      if (shard.checksums.size() != Blocks(bytes)) {
        Throw<FormatError>("'", path, "' has ", Blocks(bytes), " blocks; there are checksums of ",
                           shard.checksums.size());
      }
      shards_.push_back({path, std::move(file), positions, shard.checksums});
    }
  }

  // Checks one of `parts` parts of all blocks. Throws FormatError if one is damaged.
  void Verify(int part, int parts, const Stop& stop) const {
    int turn = 0;
    for (const Shard& shard : shards_) {
      for (std::size_t block = 0; block < shard.checksums.size(); ++block) {
        if (stop) return;
        if (std::exchange(turn, (turn + 1) % parts) != part) continue;
        const std::size_t begin = block * kContextBlock;
        const ConstBytes rest = shard.file->bytes().subspan(begin);
        const std::uint64_t sum = ContextChecksum(rest.first(std::min(rest.size(), kContextBlock)));
        if (sum == shard.checksums[block]) continue;
        Throw<FormatError>("'", shard.path, "' is damaged after byte ", begin, ": the checksum is ",
                           Hex(sum), ", not ", Hex(shard.checksums[block]));
      }
    }
  }

  // Fills slots of this rank's cache from wherever their rows lie.
  void Copy(KvCache& cache, SequenceId id, SlotRange slots, const Stop& stop) const {
    constexpr std::int64_t kSlots = 256;  // at a time
    const std::size_t k_slot =
        static_cast<std::size_t>(options_.kv_heads) * RowBytes(options_.dtype, options_.head_dim);
    const std::size_t v_slot = SlotBytes(options_) - k_slot;
    const Positions positions = cache.positions(id);
    std::vector<std::byte> k(kSlots * k_slot);
    std::vector<std::byte> v(kSlots * v_slot);
    for (int layer = 0; layer < options_.layers; ++layer) {
      for (std::int64_t begin = slots.begin; begin < slots.end && !stop; begin += kSlots) {
        const std::int64_t count = std::min(kSlots, slots.end - begin);
        for (std::int64_t i = 0; i < count; ++i) {
          const auto [k_row, v_row] = Find(layer, positions[begin + i], k_slot, v_slot);
          std::memcpy(&k[static_cast<std::size_t>(i) * k_slot], k_row, k_slot);
          std::memcpy(&v[static_cast<std::size_t>(i) * v_slot], v_row, v_slot);
        }
        cache.Write(id, layer, {begin, begin + count},
                    TensorView::Dense(k.data(), options_.dtype, count, options_.kv_heads,
                                      options_.head_dim),
                    TensorView::Dense(v.data(), options_.dtype, count, options_.kv_heads,
                                      options_.v_head_dim));
      }
    }
  }

 private:
  struct Shard {
    std::string path;
    std::unique_ptr<MappedFile> file;
    Positions positions;
    std::vector<std::uint64_t> checksums;
  };

  // A token's keys and values, all heads.
  std::pair<const std::byte*, const std::byte*> Find(int layer, std::int64_t position,
                                                     std::size_t k_slot, std::size_t v_slot) const {
    const Shard& shard = shards_[static_cast<std::size_t>(layout_.Owner(position))];
    const auto slots = static_cast<std::size_t>(shard.positions.count());
    const auto slot = static_cast<std::size_t>(shard.positions.CountBelow(position));
    const std::byte* base =
        shard.file->bytes().data() + static_cast<std::size_t>(layer) * slots * (k_slot + v_slot);
    return {base + slot * k_slot, base + slots * k_slot + slot * v_slot};
  }

  const KvCacheOptions options_;
  const Layout layout_;
  std::vector<Shard> shards_;
};

// The manifest that rank 0 reads, on all ranks. Collective.
std::string ShareManifest(Communicator& comm, const fs::path& path) {
  std::string text;
  WorkTogether(comm, [&](const Stop&) {
    if (comm.rank() == 0) text = ReadManifest(path);
  });
  RunCollective(comm, [&] {
    std::uint64_t size = text.size();
    Broadcast(comm, 0, std::as_writable_bytes(std::span(&size, 1)));
    text.resize(size);
    Broadcast(comm, 0, std::as_writable_bytes(std::span(text)));
  });
  return text;
}

}  // namespace

void SaveContext(LlamaRank& rank, Communicator& comm, SequenceId id, std::span<const Token> tokens,
                 const std::string& folder) {
  const KvCache& cache = rank.cache();
  std::uint64_t number = 0;
  RunCollective(comm, [&] {
    comm.SetStep("save", 0);
    Require(cache.length(id) == static_cast<std::int64_t>(tokens.size()), "the sequence has ",
            cache.length(id), " tokens; ", tokens.size(), " were given");
    Require(!tokens.empty(), "a context without tokens cannot be saved");
    if (comm.rank() == 0) number = RandomNumber();
    Broadcast(comm, 0, std::as_writable_bytes(std::span(&number, 1)));
  });
  ContextWriter writer(comm, cache, id, folder, number);
  writer.LockFolder();
  std::vector<ContextManifest::Shard> shards = writer.WriteShards();
  writer.Publish({.model = rank.model().fingerprint(),
                  .model_name = rank.model().shape().name,
                  .kv_type = std::string(Name(cache.options().dtype)),
                  .first_rank = cache.first_rank(id),
                  .shards = std::move(shards),
                  .tokens = {tokens.begin(), tokens.end()}});
  writer.RemoveReplaced();
}

SavedContext DescribeContext(const LlamaModel& model, DType kv_type, const std::string& folder) {
  const fs::path path = fs::path(folder) / kManifestName;
  ContextManifest manifest = ParseManifest(ReadManifest(path), path.string());
  RequireModel(manifest, model, kv_type, path.string());
  return {std::move(manifest.tokens)};
}

std::vector<Token> LoadContext(LlamaRank& rank, Communicator& comm, SequenceId id,
                               const std::string& folder) {
  KvCache& cache = rank.cache();
  RunCollective(comm, [&] {
    comm.SetStep("load", 0);
    Require(cache.length(id) == 0, "the sequence has ", cache.length(id),
            " tokens already; a context is loaded into an empty one");
  });
  const fs::path path = fs::path(folder) / kManifestName;
  const std::string text = ShareManifest(comm, path);
  ContextManifest manifest;
  std::optional<SavedShards> shards;
  WorkTogether(comm, [&](const Stop& stop) {
    manifest = ParseManifest(text, path.string());
    RequireModel(manifest, rank.model(), cache.options().dtype, path.string());
    shards.emplace(manifest, cache.options(), folder);
    shards->Verify(comm.rank(), comm.size(), stop);
  });
  const auto tokens = static_cast<std::int64_t>(manifest.tokens.size());
  rank.RequireRoomFor(id, tokens);
  SlotRange own;
  RunCollective(comm, [&] { own = cache.Grow(id, tokens); });
  WorkTogether(comm, [&](const Stop& stop) { shards->Copy(cache, id, own, stop); });
  return std::move(manifest.tokens);
}

}  // namespace treeline::model
