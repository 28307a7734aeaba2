#include "server/access.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/error.h"
#include "base/text.h"
#include "server/api_error.h"
#include "server/fields.h"

namespace kt::inline server {
namespace {

// Takes as long for every key of one length.
bool same_key(std::string_view given, std::string_view key) {
  unsigned char difference = given.size() != key.size();
  for (size_t i = 0; i < key.size(); ++i)
    difference |= static_cast<unsigned char>((i < given.size() ? given[i] : '\0') ^ key[i]);
  return difference == 0;
}

// What follows "Bearer " or the like, whatever its case.
std::optional<std::string_view> credentials(std::string_view value, std::string_view scheme) {
  if (value.size() <= scheme.size() || value[scheme.size()] != ' ') return std::nullopt;
  for (size_t i = 0; i < scheme.size(); ++i)
    if ((value[i] | 0x20) != (scheme[i] | 0x20)) return std::nullopt;
  return value.substr(scheme.size() + 1);
}

std::string from_base64(std::string_view letters) {
  std::string out;
  uint32_t bits = 0;
  int count = 0;
  for (char letter : letters) {
    constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const size_t value = kAlphabet.find(letter);
    if (value == kAlphabet.npos) break;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((count += 6) < 8) continue;
    count -= 8;
    out += static_cast<char>(bits >> count & 0xFF);
  }
  return out;
}

// Bearer for programs; Basic with any name and the key as the password for browsers, which ask for it when
// they open the page; x-api-key for Anthropic's clients.
std::string key_of(const HttpRequest& request) {
  if (const auto key = request.header("x-api-key")) return std::string(*key);
  const std::string_view value = request.header("authorization").value_or("");
  if (const auto key = credentials(value, "Bearer")) return std::string(*key);
  if (const auto pair = credentials(value, "Basic")) {
    const std::string decoded = from_base64(*pair);
    const size_t colon = decoded.find(':');
    return colon == decoded.npos ? decoded : decoded.substr(colon + 1);
  }
  return {};
}

std::string lower_name(std::string_view name) {
  std::string out(name);
  std::ranges::transform(out, out.begin(), lower_ascii);
  if (out.ends_with('.')) out.pop_back();  // "localhost." is the same name
  return out;
}

// The name or address in "name", "name:port", "[::1]:port"; what has no such form is left whole, and no name of ours.
std::string_view without_port(std::string_view host) {
  if (!host.starts_with('[')) return host.substr(0, host.find(':'));
  const size_t end = host.find("]:");
  return end == host.npos ? host : host.substr(0, end + 1);
}

bool is_address(const std::string& name) {
  std::array<unsigned char, sizeof(in6_addr)> unused;
  if (!name.starts_with('[')) return ::inet_pton(AF_INET, name.c_str(), unused.data()) == 1;
  return name.ends_with(']') &&
         ::inet_pton(AF_INET6, name.substr(1, name.size() - 2).c_str(), unused.data()) == 1;
}

// The machine's name, its first word, and that in the domain of names that a local network makes up itself.
std::vector<std::string> machine_names() {
  std::array<char, 256> buffer{};
  if (::gethostname(buffer.data(), buffer.size() - 1) != 0 || buffer[0] == '\0') return {};
  const std::string whole = lower_name(buffer.data()), first = whole.substr(0, whole.find('.'));
  return {whole, first, first + ".local"};
}

}  // namespace

Access::Access(AccessOptions options)
    : options_(std::move(options)),
      names_(machine_names()),
      asks_(!options_.api_keys.empty()),
      keys_(std::move(options_.api_keys)) {
  for (const std::string& name : options_.allow_hosts) names_.push_back(lower_name(without_port(name)));
}

void Access::set_keys(std::vector<std::string> keys) {
  if (keys.empty() == asks_)
    fail("expected {}", asks_ ? "at least one key" : "no keys: none were asked for before");
  const std::lock_guard lock(mutex_);
  std::swap(keys_, keys);
}

// All keys are compared: how long it takes says nothing of which it was.
bool Access::knows(std::string_view key) const {
  const std::lock_guard lock(mutex_);
  bool known = false;
  for (const std::string& one : keys_) known = same_key(key, one) || known;
  return known;
}

void Access::check_host(const HttpRequest& request) const {
  const std::string host = lower_name(without_port(request.header("host").value_or("")));
  if (host.empty() || host == "localhost" || host.ends_with(".localhost") || is_address(host)) return;
  const auto allowed = [&](const std::string& name) { return name == "*" || name == host; };
  if (std::ranges::any_of(names_, allowed)) return;
  throw ApiError(403,
                 text("Host: {} is no name of this server; it has localhost, addresses, the machine's own "
                      "name and those it was started with (allow_host)",
                      shown_value(host)));
}

void Access::check(const HttpRequest& request) const {
  if (asks_ && !knows(key_of(request)))
    throw ApiError(401, "the API key is missing or wrong; send Authorization: Bearer KEY");
  check_host(request);
  // A page of another origin must not use what runs on this machine behind its user's back.
  const auto origin = request.header("origin");
  if (!origin || options_.allow_origin == "*" || *origin == options_.allow_origin) return;
  const std::string_view host = request.header("host").value_or("");
  if (*origin != text("http://{}", host) && *origin != text("https://{}", host))
    throw ApiError(403, text("pages of {} may not use this server: it allows its own alone, or the origin it "
                             "was started with (allow_origin)",
                             *origin));
}

}  // namespace kt::inline server
