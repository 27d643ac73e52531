#include "faults.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace fake {

namespace {

struct Fault {
  std::string place, what;
  std::map<std::string, std::string> keys;
  std::atomic<long> passed{0};  // how often this process came by
};

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, by);)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

using Faults = std::vector<std::unique_ptr<Fault>>;

std::shared_ptr<Faults> parsed(const std::string& text) {
  auto faults = std::make_shared<Faults>();
  for (const std::string& each : split(text, ';')) {
    auto fault = std::make_unique<Fault>();
    auto words = split(each, ',');
    auto colon = words[0].find(':');
    if (colon == std::string::npos) {
      shout("FAKE_FAULTS: no colon in '%s'", each.c_str());
      abort();
    }
    fault->place = words[0].substr(0, colon);
    fault->what = words[0].substr(colon + 1);
    for (size_t i = 1; i < words.size(); i++) {
      auto equals = words[i].find('=');
      fault->keys[words[i].substr(0, equals)] =
          equals == std::string::npos ? "" : words[i].substr(equals + 1);
    }
    faults->push_back(std::move(fault));
  }
  return faults;
}

// What FAKE_FAULTS says. With @FILE it is what stands in that file, read again whenever another was moved into its place.
std::shared_ptr<Faults> faults() {
  static const std::string& text = *new std::string(getenv("FAKE_FAULTS") ? getenv("FAKE_FAULTS") : "");
  static std::mutex& lock = *new std::mutex;
  static auto& known = *new std::shared_ptr<Faults>(parsed(text.substr(0, 1) == "@" ? "" : text));
  static timespec when{};  // not the inode: the file system gives that of the file before to the next one
  std::lock_guard<std::mutex> guard(lock);
  struct stat about {};
  if (text.substr(0, 1) != "@" || stat(text.c_str() + 1, &about)) return known;
  if (about.st_ctim.tv_sec == when.tv_sec && about.st_ctim.tv_nsec == when.tv_nsec) return known;
  std::ifstream file(text.substr(1));
  std::string line;
  std::getline(file, line);
  when = about.st_ctim;
  known = parsed(line);
  return known;
}

long number(const Fault& fault, const char* key, long otherwise) {
  auto found = fault.keys.find(key);
  return found == fault.keys.end() ? otherwise : atol(found->second.c_str());
}

// Whether this passage is the one that is meant. `once` names a file that the first process to suffer makes: so a worker
// that is started in its place is spared; it says which process that was, and when. `when` names a file that has to be there.
bool meant(Fault& fault, int device, int rank) {
  if (number(fault, "device", device) != device || number(fault, "rank", rank) != rank) return false;
  auto when = fault.keys.find("when");
  if (when != fault.keys.end() && access(when->second.c_str(), F_OK) != 0) return false;
  auto host = fault.keys.find("host");
  const char* here = getenv("FAKE_HOST");
  if (host != fault.keys.end() && host->second != (here ? here : "")) return false;
  const long passed = ++fault.passed;
  const long nth = number(fault, "nth", 0);
  if (nth != 0 && passed != nth) return false;
  auto once = fault.keys.find("once");
  if (once == fault.keys.end()) return true;
  const int file = open(once->second.c_str(), O_CREAT | O_EXCL | O_WRONLY, 0600);
  if (file < 0) return false;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  dprintf(file, "%d %ld.%09ld\n", getpid(), now.tv_sec, now.tv_nsec);
  close(file);
  return true;
}

void write_line(const char* format, va_list arguments) {
  char text[1024];
  vsnprintf(text, sizeof text, format, arguments);
  fprintf(stderr, "[fake cuda %d] %s\n", getpid(), text);
}

}  // namespace

long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

void log(const char* format, ...) {
  static const bool wanted = setting("FAKE_CUDA_LOG", 0) != 0;
  if (!wanted) return;
  va_list arguments;
  va_start(arguments, format);
  write_line(format, arguments);
  va_end(arguments);
}

void shout(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_line(format, arguments);
  va_end(arguments);
}

void hang() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

Blow strike(const char* place, int device, int rank, unsigned long bytes, int* code) {
  Blow blow = Blow::none;
  const auto now = faults();
  for (const auto& fault : *now) {
    if (fault->place != place || !meant(*fault, device, rank)) continue;
    if (fault->what == "slow") {
      const long mbps = number(*fault, "mbps", 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(number(*fault, "ms", 0)) +
                                  std::chrono::microseconds(mbps ? bytes / mbps : 0));
      continue;
    }
    shout("%s at %s: device %d, rank %d", fault->what.c_str(), place, device, rank);
    if (fault->what == "die") kill(getpid(), SIGKILL);
    if (fault->what == "freeze") kill(getpid(), SIGSTOP);
    if (fault->what == "error") blow = Blow::error;
    if (fault->what == "error" && code) *code = static_cast<int>(number(*fault, "code", *code));
    if (fault->what == "hang") blow = Blow::hang;
  }
  return blow;
}

}  // namespace fake
