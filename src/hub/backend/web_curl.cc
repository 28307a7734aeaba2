#include <curl/curl.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <exception>
#include <mutex>

#include "base/error.h"
#include "base/utf8.h"
#include "hub/web.h"

namespace kt::inline hub {
namespace {

constexpr size_t kMostFields = 64, kLongestField = 8192;

// A request under way.
struct Flight {
  uint64_t id = 0;
  WebRequest request;
  WebHead head;
  CURL* handle = nullptr;
  curl_slist* fields = nullptr;
  bool refused = false;
  std::exception_ptr failure;  // of the sink; thrown to whoever waits
  std::array<char, CURL_ERROR_SIZE> reason{};

  ~Flight() {
    curl_slist_free_all(fields);
    curl_easy_cleanup(handle);
  }
};

// A line of the answer's head. Each answer begins anew: a proxy may send one of its own first.
size_t take_field(const char* bytes, size_t, size_t count, void* user) {
  Flight& flight = *static_cast<Flight*>(user);
  std::string_view line(bytes, count);
  if (line.starts_with("HTTP/")) {
    flight.head = {};
    const size_t space = line.find(' ');
    if (space == line.npos) return count;
    const std::string_view status = line.substr(space + 1, 3);
    std::from_chars(status.data(), status.data() + status.size(), flight.head.status);
    return count;
  }
  const size_t colon = line.find(':');
  if (colon == line.npos || flight.head.fields.size() >= kMostFields || count > kLongestField) return count;
  std::string name(line.substr(0, colon));
  for (char& c : name)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  std::string_view value = line.substr(colon + 1);
  while (!value.empty() && (value.front() == ' ' || value.front() == '\t')) value.remove_prefix(1);
  while (!value.empty() && (value.back() == '\r' || value.back() == '\n' || value.back() == ' '))
    value.remove_suffix(1);
  flight.head.fields[name] = std::string(value);
  return count;
}

size_t take_body(const char* bytes, size_t, size_t count, void* user) {
  Flight& flight = *static_cast<Flight*>(user);
  if ((flight.head.status != 200 && flight.head.status != 206) || !flight.request.sink) return count;
  try {
    if (flight.request.sink(flight.head, std::as_bytes(std::span(bytes, count)))) return count;
    flight.refused = true;
  } catch (...) {  // not through C
    flight.failure = std::current_exception();
  }
  return count + 1;
}

std::string certificates() {
  for (const char* name : {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"})
    if (const char* value = std::getenv(name); value && *value) return value;
  return "";
}

void set_up(Flight& flight) {
  CURL* const handle = flight.handle;
  for (const std::string& field : flight.request.fields)
    flight.fields = curl_slist_append(flight.fields, field.c_str());
  curl_easy_setopt(handle, CURLOPT_URL, flight.request.url.c_str());
  curl_easy_setopt(handle, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(handle, CURLOPT_HTTPHEADER, flight.fields);
  curl_easy_setopt(handle, CURLOPT_USERAGENT, "kt");
  if (!flight.request.range.empty()) curl_easy_setopt(handle, CURLOPT_RANGE, flight.request.range.c_str());
  curl_easy_setopt(handle, CURLOPT_FOLLOWLOCATION, 0L);
  // Ranges side by side want a connection each.
  curl_easy_setopt(handle, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  curl_easy_setopt(handle, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(handle, CURLOPT_CONNECTTIMEOUT, 30L);
  curl_easy_setopt(handle, CURLOPT_LOW_SPEED_LIMIT, 1L);
  curl_easy_setopt(handle, CURLOPT_LOW_SPEED_TIME, 60L);
  curl_easy_setopt(handle, CURLOPT_BUFFERSIZE, 512L << 10);
  curl_easy_setopt(handle, CURLOPT_HEADERFUNCTION, take_field);
  curl_easy_setopt(handle, CURLOPT_HEADERDATA, &flight);
  curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, take_body);
  curl_easy_setopt(handle, CURLOPT_WRITEDATA, &flight);
  curl_easy_setopt(handle, CURLOPT_ERRORBUFFER, flight.reason.data());
  curl_easy_setopt(handle, CURLOPT_PRIVATE, &flight);
  if (const std::string file = certificates(); !file.empty())
    curl_easy_setopt(handle, CURLOPT_CAINFO, file.c_str());
}

}  // namespace

struct Web::State {
  CURLM* multi = nullptr;
  uint64_t next = 1;
  std::vector<std::unique_ptr<Flight>> flights;

  std::unique_ptr<Flight> take(CURL* handle) {
    curl_multi_remove_handle(multi, handle);
    const auto at = std::ranges::find(flights, handle, [](const auto& one) { return one->handle; });
    KT_CHECK(at != flights.end());
    std::unique_ptr<Flight> out = std::move(*at);
    flights.erase(at);
    return out;
  }
};

Web::Web() : state_(std::make_unique<State>()) {
  static std::once_flag once;
  std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
  state_->multi = curl_multi_init();
  if (!state_->multi) fail_as(ErrorKind::kMemory, "no memory for connections");
}

Web::~Web() {
  while (!state_->flights.empty()) state_->take(state_->flights.back()->handle);
  curl_multi_cleanup(state_->multi);
}

bool Web::is_built_in() { return true; }
size_t Web::running() const { return state_->flights.size(); }

uint64_t Web::start(WebRequest request) {
  auto flight = std::make_unique<Flight>();
  flight->id = state_->next++;
  flight->request = std::move(request);
  flight->handle = curl_easy_init();
  if (!flight->handle) fail_as(ErrorKind::kMemory, "no memory for a connection");
  set_up(*flight);
  const CURLMcode code = curl_multi_add_handle(state_->multi, flight->handle);
  KT_CHECK(code == CURLM_OK, "{}", curl_multi_strerror(code));
  state_->flights.push_back(std::move(flight));
  return state_->flights.back()->id;
}

std::vector<WebAnswer> Web::wait(std::chrono::milliseconds most) {
  std::vector<WebAnswer> out;
  int running = 0, left = 0;
  curl_multi_perform(state_->multi, &running);
  const auto collect = [&] {
    while (const CURLMsg* message = curl_multi_info_read(state_->multi, &left)) {
      if (message->msg != CURLMSG_DONE) continue;
      const CURLcode code = message->data.result;
      CURL* const handle = message->easy_handle;
      const char* redirect = nullptr;
      curl_easy_getinfo(handle, CURLINFO_REDIRECT_URL, &redirect);
      WebAnswer answer;
      answer.redirect = redirect ? redirect : "";
      const std::unique_ptr<Flight> flight = state_->take(handle);
      if (flight->failure) std::rethrow_exception(flight->failure);
      answer.id = flight->id;
      answer.head = flight->head;
      answer.refused = flight->refused;
      answer.hopeless = code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE ||
                        code == CURLE_URL_MALFORMAT || code == CURLE_UNSUPPORTED_PROTOCOL;
      if (code != CURLE_OK)
        answer.problem = printable(flight->reason[0] ? flight->reason.data() : curl_easy_strerror(code), 300);
      out.push_back(std::move(answer));
    }
  };
  collect();
  if (!out.empty() || most.count() == 0) return out;
  curl_multi_poll(state_->multi, nullptr, 0, static_cast<int>(most.count()), nullptr);
  curl_multi_perform(state_->multi, &running);
  collect();
  return out;
}

}  // namespace kt::inline hub
