// The machine kt doctor looks at, and how its /proc and /sys files are read.
#include <sys/resource.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>

#include "base/cpu.h"
#include "base/file.h"
#include "base/text.h"
#include "cli/doctor/doctor.h"
#include "terminal/language.h"

extern "C" char** environ;

namespace kt::inline cli {
namespace {

uint64_t soft_limit(decltype(RLIMIT_NOFILE) which, uint64_t* most = nullptr) {
  rlimit limit{};
  if (::getrlimit(which, &limit) != 0) return ProcessLimits::kUnlimited;
  if (most) *most = limit.rlim_max == RLIM_INFINITY ? ProcessLimits::kUnlimited : limit.rlim_max;
  return limit.rlim_cur == RLIM_INFINITY ? ProcessLimits::kUnlimited : limit.rlim_cur;
}

std::string home_of(const Machine& machine) {
  if (const std::string home = machine.variable("KT_HOME"); !home.empty()) return home;
  if (const std::string config = machine.variable("XDG_CONFIG_HOME"); !config.empty()) return config + "/kt";
  const std::string user = machine.variable("HOME");
  return user.empty() ? "" : user + "/.config/kt";
}

}  // namespace

const char* level_name(Level level) {
  return level == Level::kOk        ? tr_later("ok")
         : level == Level::kWarning ? tr_later("warning")
                                    : tr_later("FAIL");
}

bool Diagnosis::healthy() const {
  for (const Finding& finding : findings)
    if (finding.level == Level::kBad) return false;
  return true;
}

std::string Machine::variable(std::string_view name) const {
  for (const std::string& entry : environment)
    if (entry.size() > name.size() && entry.starts_with(name) && entry[name.size()] == '=')
      return entry.substr(name.size() + 1);
  return "";
}

std::string Machine::content_of(const std::string& path) const {
  std::string content = read_small_file(root + path).value_or("");
  while (!content.empty() && std::string_view(" \t\n").find(content.back()) != std::string_view::npos)
    content.pop_back();
  return content;
}

uint64_t number_in(std::string_view lines, std::string_view key, uint64_t fallback) {
  for (size_t at = 0; at < lines.size();) {
    const size_t end = std::min(lines.find('\n', at), lines.size());
    const std::string_view line = lines.substr(at, end - at);
    at = end + 1;
    const size_t found = line.find(key);
    if (found == std::string_view::npos || (found > 0 && line[found - 1] != ' ')) continue;
    const size_t digits = line.find_first_not_of(": \t", found + key.size());
    uint64_t value = 0;
    if (digits == std::string_view::npos || digits == found + key.size()) continue;
    if (std::from_chars(line.data() + digits, line.data() + line.size(), value).ec == std::errc())
      return value;
  }
  return fallback;
}

std::optional<uint64_t> leading_number(std::string_view string) {
  uint64_t value = 0;
  if (std::from_chars(string.data(), string.data() + string.size(), value).ec != std::errc())
    return std::nullopt;
  return value;
}

Machine this_machine(const std::string& root) {
  Machine m{
      .root = root,
      .topology = root.empty() ? Topology::discover() : Topology::read_sysfs(root + "/sys", allowed_cpus()),
      .pus_online = ::sysconf(_SC_NPROCESSORS_ONLN),
      .amx_usable = cpu().amx_tile};
  if (::getloadavg(&m.load, 1) != 1) m.load = 0;
  for (char** entry = environ; entry && *entry; ++entry) m.environment.emplace_back(*entry);
  m.home = home_of(m);
  m.limits.files = soft_limit(RLIMIT_NOFILE, &m.limits.files_most);
  m.limits.locked = soft_limit(RLIMIT_MEMLOCK);
  m.limits.address_space = soft_limit(RLIMIT_AS);
  m.limits.data = soft_limit(RLIMIT_DATA);
  m.limits.file_size = soft_limit(RLIMIT_FSIZE);
  return m;
}

}  // namespace kt::inline cli
