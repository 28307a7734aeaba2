#include "hub/web.h"

#include <algorithm>

namespace kt::inline hub {

std::string WebHead::field(const std::string& name) const {
  const auto found = fields.find(name);
  return found == fields.end() ? "" : found->second;
}

std::string origin_of(const std::string& url) {
  const size_t colon = url.find("://");
  if (colon == url.npos) return "";
  const auto lower = [](std::string string) {
    for (char& c : string)
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    return string;
  };
  const std::string scheme = lower(url.substr(0, colon));
  if (scheme != "http" && scheme != "https") return "";
  const size_t start = colon + 3, end = std::min(url.find_first_of("/?#", start), url.size());
  std::string host = lower(url.substr(start, end - start));
  const auto is_odd = [](char c) {
    return c == '@' || c == '\\' || static_cast<unsigned char>(c) <= ' ' || c == 0x7f;
  };
  if (host.empty() || std::ranges::any_of(host, is_odd)) return "";
  const std::string usual = scheme == "http" ? ":80" : ":443";
  if (host.ends_with(usual)) host.resize(host.size() - usual.size());
  return scheme + "://" + host;
}

std::string escaped(std::string_view path) {
  constexpr std::string_view kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/";
  std::string out;
  for (const char c : path) {
    if (kPlain.find(c) != kPlain.npos) {
      out += c;
      continue;
    }
    const auto byte = static_cast<unsigned char>(c);
    out += '%';
    out += "0123456789ABCDEF"[byte >> 4];
    out += "0123456789ABCDEF"[byte & 15];
  }
  return out;
}

}  // namespace kt::inline hub
