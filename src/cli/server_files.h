// The files that kt run reads again when it is told to (SIGHUP): keys of its clients, its certificate and that one's
// key.
#pragma once
#include <memory>
#include <string>

#include "http/tls.h"
#include "server/server.h"

namespace kt::inline cli {

struct ServerFilePaths {
  std::string api_keys = {};  // "": none
  TlsFiles tls = {};          // the same
};

class ServerFiles {
 public:
  // Reads the pair; Error where it cannot be used. Secrets that other users of the machine may read are warned of, a
  // line each on stderr.
  explicit ServerFiles(ServerFilePaths paths);

  std::shared_ptr<const TlsServer> tls() const { return tls_; }  // null: http
  // Reads all again and says so on stderr. What cannot be used stays as it was, which is said too. Any thread.
  void reload(Server& server);

 private:
  ServerFilePaths paths_;
  std::shared_ptr<TlsServer> tls_;
};

// The line of a request, whole at once, to stderr.
void print_request(const std::string& line);

}  // namespace kt::inline cli
