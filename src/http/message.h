// Requests and replies of HTTP/1.1 as values. Knows nothing of sockets.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kt::inline http {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

// The first value of that name, whatever its case; nullopt: none.
char lower_ascii(char c);  // names of headers are compared so
std::optional<std::string_view> find_header(const HttpHeaders& headers, std::string_view name);

struct HttpRequest {
  std::string method = "GET";
  std::string path = "/";  // without the query, %XX decoded
  std::string query = {};  // after '?', as it came
  HttpHeaders headers = {};
  std::string body = {};
  std::optional<std::string_view> header(std::string_view name) const { return find_header(headers, name); }
};

struct HttpReply {
  int status = 200;
  std::string type = "application/json";  // Content-Type
  std::string body = {};
  HttpHeaders headers = {};  // besides Content-Type, Content-Length, Transfer-Encoding and Connection
};

std::string_view reason_of(int status);  // "Not Found"

}  // namespace kt::inline http
