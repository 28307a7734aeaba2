// Requests to servers of the Internet, several at once, on the caller's thread: HTTP(S) through libcurl, proxies by its
// variables. Follows no redirect by itself: who asks decides what the next server may see. Without libcurl in the build
// there is none of it, and the constructor says so.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kt::inline hub {

struct WebHead {
  int status = 0;
  std::map<std::string, std::string> fields;  // by lower-case name
  std::string field(const std::string& name) const;
};

struct WebRequest {
  std::string url;
  std::vector<std::string> fields;  // "Name: value"
  std::string range;                // "0-499"; "": all
  // Takes the bytes of an answer of status 200 or 206 as they come; false ends the transfer. Bodies of other answers
  // are dropped.
  std::function<bool(const WebHead&, std::span<const std::byte>)> sink;
};

struct WebAnswer {
  uint64_t id = 0;
  WebHead head;
  std::string redirect;   // of a 3xx: the address to go to, absolute
  std::string problem;    // why no whole answer came; "" if one did
  bool hopeless = false;  // the problem is none of the moment: a certificate, an address
  bool refused = false;   // the sink did not want more
};

class Web {
 public:
  Web();  // Error(kUnsupported) without libcurl
  ~Web();
  Web(const Web&) = delete;
  Web& operator=(const Web&) = delete;

  static bool is_built_in();

  uint64_t start(WebRequest request);
  // Moves bytes until something ends or the time is over; what ended.
  std::vector<WebAnswer> wait(std::chrono::milliseconds most);
  size_t running() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// "https://host:port" of an address, lower case, the usual port left out; "" for anything that is no plain http or
// https address, or that carries a name and password.
std::string origin_of(const std::string& url);

// Bytes that may not stand in an address as %XX; '/' stays.
std::string escaped(std::string_view path);

}  // namespace kt::inline hub
