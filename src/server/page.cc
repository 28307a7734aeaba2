#include "server/page.h"

#include <string_view>

#include "server/page_files.h"

namespace kt::inline server {
namespace {

// Nothing but our own files runs, nothing is asked of another machine, and nobody frames the page: text of a
// model that found a way into the document would still be inert.
constexpr std::string_view kPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

std::string_view mime_type(std::string_view name) {
  if (name.ends_with(".html")) return "text/html; charset=utf-8";
  if (name.ends_with(".css")) return "text/css; charset=utf-8";
  if (name.ends_with(".js")) return "text/javascript; charset=utf-8";
  return "image/svg+xml";
}

std::string_view name_of(std::string_view path) {
  if (path == "/") return "index.html";
  if (path == "/favicon.ico") return "icon.svg";  // browsers ask for it unasked; all of today draw SVG
  return path.empty() ? path : path.substr(1);
}

}  // namespace

std::optional<HttpReply> page_reply(const std::string& path) {
  const std::string_view name = name_of(path);
  for (const EmbeddedFile& file : page_files()) {
    if (file.name != name) continue;
    return HttpReply{.type = std::string(mime_type(name)),
                     .body = std::string(file.bytes),
                     .headers = {{"Cache-Control", "no-cache"},
                                 {"Content-Security-Policy", std::string(kPolicy)},
                                 {"X-Content-Type-Options", "nosniff"},
                                 {"Referrer-Policy", "no-referrer"}}};
  }
  return std::nullopt;
}

}  // namespace kt::inline server
