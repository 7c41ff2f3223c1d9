#include "model/durable_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

#include "core/check.h"

namespace treeline::model {

namespace fs = std::filesystem;

void FailToWrite(const fs::path& path) {
  Throw<FormatError>("cannot write '", path.string(), "': ", std::strerror(errno));
}

Descriptor::Descriptor(const fs::path& path, int flags)
    : file_(open(path.c_str(), flags | O_CLOEXEC, 0644)) {
  if (file_ < 0) FailToWrite(path);
}

Descriptor::~Descriptor() {
  if (file_ >= 0) close(file_);
}

bool Descriptor::Sync() const {
  while (fsync(file_) != 0) {
    if (errno != EINTR) return false;
  }
  return true;
}

bool Descriptor::Close() { return close(std::exchange(file_, -1)) == 0; }

void NewFile::Remove() noexcept {
  file_.reset();
  std::error_code ignored;
  if (created_) fs::remove(path_, ignored);
}

void NewFile::Create() {
  file_.emplace(path_, O_WRONLY | O_CREAT | O_EXCL);
  created_ = true;
}

void NewFile::Write(ConstBytes bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(file_->get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) FailToWrite(path_);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void NewFile::Close() {
  if (!file_->Sync() || !file_->Close()) FailToWrite(path_);
}

void SyncFolder(const fs::path& folder) {
  const Descriptor file(folder, O_RDONLY | O_DIRECTORY);
  // Some file systems have no such call for folders.
  if (!file.Sync() && errno != EINVAL) FailToWrite(folder);
}

void MakeFolder(const fs::path& folder) {
  std::error_code error;
  if (fs::is_directory(folder, error)) return;
  const fs::path parent = folder.has_parent_path() ? folder.parent_path() : fs::path(".");
  if (parent != folder) MakeFolder(parent);
  fs::create_directory(folder, error);
  if (error) Throw<FormatError>("cannot make '", folder.string(), "': ", error.message());
  SyncFolder(parent);
}

FolderLock::FolderLock(const fs::path& folder, const Stop& stop)
    : file_(folder / "context.lock", O_RDWR | O_CREAT) {
  constexpr std::chrono::milliseconds kNap{20};
  constexpr std::chrono::minutes kPatience{10};
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      Throw<FormatError>("cannot lock '", folder.string(), "': ", std::strerror(errno));
    }
    if (stop) return;
    if (std::chrono::steady_clock::now() > deadline) {
      Throw<FormatError>("'", folder.string(), "' is locked: another context is being saved there");
    }
    std::this_thread::sleep_for(kNap);
  }
}

}  // namespace treeline::model
