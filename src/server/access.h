// Who may use the server: the key that a request carries, the host it was sent to and the page it comes from. ApiError
// is the only answer; nothing here looks at what is asked for.
#pragma once
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "http/message.h"

namespace kt::inline server {

struct AccessOptions {
  std::vector<std::string> api_keys = {};  // any of them will do; none: no key is asked for
  std::string allow_origin =
      {};  // pages of this origin, or "*", may use the API from a browser; "": our own only
  // Names of this server besides those that always are: localhost, addresses and the machine's own name; "*" is any.
  std::vector<std::string> allow_hosts = {};
};

class Access {
 public:
  explicit Access(AccessOptions options);

  // From now on these; any thread. A server that asks for keys is never left without: Error(kInput).
  void set_keys(std::vector<std::string> keys);

  const std::string& allow_origin() const { return options_.allow_origin; }
  // ApiError(403) for a Host that is no name of this server. A page whose own name is made to point to this machine
  // reads whatever answers it (DNS rebinding): no origin is foreign to it, and only the name gives it away. An address
  // cannot be made to point elsewhere, and what sends no Host is no browser.
  void check_host(const HttpRequest& request) const;
  // ApiError(401) without the key, (403) for hosts and for pages of other origins.
  void check(const HttpRequest& request) const;

 private:
  bool knows(std::string_view key) const;

  AccessOptions options_;           // but for the keys
  std::vector<std::string> names_;  // in lower case
  const bool asks_;                 // for a key
  mutable std::mutex mutex_;
  std::vector<std::string> keys_;  // under mutex_
};

}  // namespace kt::inline server
