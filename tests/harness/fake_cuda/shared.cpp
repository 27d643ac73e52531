#include "shared.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "faults.h"

namespace fake {

namespace {

[[noreturn]] void failed(const std::string& what) {
  shout("%s: %s", what.c_str(), strerror(errno));
  abort();
}

}  // namespace

Shared::Shared(const std::string& name) : name_(name) {
  const char* root = getenv("FAKE_CUDA_SHARED");
  folder_ = std::string(root && *root ? root : "/dev/shm") + "/fake-nccl-" + name;
  mkdir(folder_.c_str(), 0700);
  const std::string page = folder_ + "/seats";
  const size_t bytes = sizeof(Seat) * kMaxRanks;
  const int file = open(page.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) failed(page);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) failed(page);
  seats_ = static_cast<Seat*>(at);
}

Shared::~Shared() { munmap(seats_, sizeof(Seat) * kMaxRanks); }

// Renamed into place when it is whole.
void Shared::put(const std::string& what, const void* data, size_t bytes) {
  const std::string path = folder_ + "/" + what, part = path + ".part";
  const int file = open(part.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) failed(part);
  for (size_t done = 0; done < bytes;) {
    const ssize_t wrote = write(file, static_cast<const char*>(data) + done, bytes - done);
    if (wrote <= 0) failed(part);
    done += static_cast<size_t>(wrote);
  }
  close(file);
  rename(part.c_str(), path.c_str());
}

bool Shared::there(const std::string& what) const { return access((folder_ + "/" + what).c_str(), F_OK) == 0; }

bool Shared::get(const std::string& what, std::vector<char>& data) const {
  const std::string path = folder_ + "/" + what;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  struct stat about {};
  if (fstat(file, &about)) failed(path);
  data.resize(static_cast<size_t>(about.st_size));
  for (size_t done = 0; done < data.size();) {
    const ssize_t got = read(file, data.data() + done, data.size() - done);
    if (got <= 0) failed(path);
    done += static_cast<size_t>(got);
  }
  close(file);
  return true;
}

void Shared::remove(const std::string& what) { unlink((folder_ + "/" + what).c_str()); }

void Shared::remove_all() {
  if (DIR* folder = opendir(folder_.c_str())) {
    while (dirent* each = readdir(folder))
      if (each->d_name[0] != '.') remove(each->d_name);
    closedir(folder);
  }
  rmdir(folder_.c_str());
}

}  // namespace fake
