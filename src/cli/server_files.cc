#include "cli/server_files.h"

#include <sys/stat.h>

#include <cstdio>

#include "base/error.h"
#include "base/text.h"
#include "cli/server_key.h"
#include "terminal/language.h"

namespace kt::inline cli {
namespace {

void warn_if_others_may_read(const std::string& path) {
  struct stat about{};
  if (path.empty() || ::stat(path.c_str(), &about) != 0 || !(about.st_mode & S_IROTH)) return;
  const std::string warning =
      text(tr("kt: warning: every user of this machine can read {}; chmod o= {}"), path, path);
  std::fprintf(stderr, "%s\n", warning.c_str());
}

}  // namespace

ServerFiles::ServerFiles(ServerFilePaths paths) : paths_(std::move(paths)) {
  if (!paths_.tls.certificate.empty()) tls_ = std::make_shared<TlsServer>(paths_.tls);
  warn_if_others_may_read(paths_.api_keys);
  warn_if_others_may_read(paths_.tls.key);
}

void ServerFiles::reload(Server& server) {
  const auto again = [](const std::string& what, const auto& read) {
    try {
      read();
      std::fprintf(stderr, "kt: read %s again\n", what.c_str());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "kt: warning: %s; what was read before goes on\n", error.what());
    }
  };
  if (!paths_.api_keys.empty())
    again(paths_.api_keys, [&] { server.set_api_keys(keys_in_file(paths_.api_keys)); });
  if (paths_.api_keys.empty() && !tls_)
    std::fprintf(stderr, "kt: there are no keys or certificates to read again\n");
  if (tls_) again(paths_.tls.certificate, [&] { tls_->reload(); });
  warn_if_others_may_read(paths_.api_keys);
  warn_if_others_may_read(paths_.tls.key);
}

void print_request(const std::string& line) {
  const std::string whole = line + "\n";
  std::fwrite(whole.data(), 1, whole.size(), stderr);
}

}  // namespace kt::inline cli
