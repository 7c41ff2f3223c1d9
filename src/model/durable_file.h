#pragma once

#include <filesystem>
#include <optional>
#include <utility>

#include "model/work_together.h"
#include "treeline/comm.h"

namespace treeline::model {

// Throws FormatError: the path, and what errno says.
[[noreturn]] void FailToWrite(const std::filesystem::path& path);

// A file descriptor.
class Descriptor {
 public:
  // Throws FormatError if it cannot be opened.
  Descriptor(const std::filesystem::path& path, int flags);
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return file_; }
  // False if something could not be written.
  bool Sync() const;
  bool Close();

 private:
  int file_;
};

// A file that is on the disk once it is closed, and is removed at the end unless it is kept.
class NewFile {
 public:
  explicit NewFile(std::filesystem::path path) : path_(std::move(path)) {}
  ~NewFile() {
    if (!kept_) Remove();
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void Keep() { kept_ = true; }
  void Remove() noexcept;

  // Throw FormatError; Create, if there is such a file.
  void Create();
  void Write(ConstBytes bytes);
  void Close();

 private:
  const std::filesystem::path path_;
  std::optional<Descriptor> file_;
  bool created_ = false;
  bool kept_ = false;
};

// Makes sure that a crash does not undo what was made, renamed or removed in a folder.
void SyncFolder(const std::filesystem::path& folder);

// With those that it lies in.
void MakeFolder(const std::filesystem::path& folder);

// Held by the only process that may change a folder. The file stays: if it were removed, two could
// hold a lock of that name.
class FolderLock {
 public:
  // Waits for others. Throws FormatError if they take too long; does not have the lock if stopped.
  FolderLock(const std::filesystem::path& folder, const Stop& stop);

 private:
  const Descriptor file_;
};

}  // namespace treeline::model
