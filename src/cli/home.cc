#include "cli/home.h"

#include <fcntl.h>
#include <pwd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/file.h"
#include "terminal/language.h"
#include "text/yaml.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

std::string reason(int code) { return std::generic_category().message(code); }

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Held while it lives; waits for whoever holds it.
class FileLock {
 public:
  explicit FileLock(const std::string& path)
      : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR)) {
    if (fd_ < 0) fail("{}: cannot create: {}", path, reason(errno));
    while (::flock(fd_, LOCK_EX) != 0) {
      if (errno == EINTR) continue;
      const int code = errno;
      ::close(fd_);
      fail("{}: cannot lock: {}", path, reason(code));
    }
  }
  ~FileLock() { ::close(fd_); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int fd_;
};

void make_home(const std::string& folder) {
  std::error_code code;
  const bool made = fs::create_directories(folder, code);
  if (code) fail(tr("{}: cannot create the folder: {}; KT_HOME names another"), folder, code.message());
  if (made) ::chmod(folder.c_str(), S_IRWXU);
}

// A file that AtomicFile replaces keeps its permissions, so it gets them before there is anything in it.
void make_private(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (fd < 0 && errno != EEXIST) fail("{}: cannot create: {}", path, reason(errno));
  if (fd >= 0) ::close(fd);
}

}  // namespace

std::string kt_home() {
  if (const std::string home = variable("KT_HOME"); !home.empty()) return home;
  if (const std::string config = variable("XDG_CONFIG_HOME"); !config.empty()) return config + "/kt";
  std::string home = variable("HOME");
  if (home.empty())
    if (const passwd* user = ::getpwuid(::getuid())) home = user->pw_dir ? user->pw_dir : "";
  if (home.empty()) fail(tr("no folder for kt's files: set KT_HOME, XDG_CONFIG_HOME or HOME"));
  return home + "/.config/kt";
}

Json read_mapping(const std::string& path) {
  std::error_code code;
  if (!fs::exists(path, code)) {
    // Absent is normal; out of sight is not.
    if (code && code != std::errc::no_such_file_or_directory)
      fail("{}: cannot be read: {}", path, code.message());
    return Json::object();
  }
  Json out = read_yaml(path);
  if (out.is_null()) return Json::object();
  if (!out.is_object()) fail("{}: expected a mapping of keys to values, found {}", path, json_kind(out));
  return out;
}

void update_mapping(const std::string& path, std::string_view heading,
                    const std::function<void(Json&)>& change) {
  const std::string folder = fs::path(path).parent_path().string();
  make_home(folder);
  const FileLock lock(folder + "/lock");
  Json mapping = read_mapping(path);
  change(mapping);
  std::string out(heading);
  if (!mapping.empty()) out += to_yaml(mapping);
  // A link to a file elsewhere stays one.
  std::error_code code;
  const fs::path real = fs::weakly_canonical(path, code);
  const std::string target = code ? path : real.string();
  make_private(target);
  write_atomically(target, out);
}

}  // namespace kt::inline cli
