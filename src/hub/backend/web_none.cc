// In place of web_curl.cc where the build found no libcurl.
#include "base/error.h"
#include "hub/web.h"

namespace kt::inline hub {

struct Web::State {};

Web::Web() {
  fail_as(ErrorKind::kUnsupported,
          "this kt was built without libcurl and cannot download: install libcurl4-openssl-dev and build "
          "again, or fetch "
          "the files with another tool (hf download ORG/REPO): kt finds them in the hub's cache");
}
Web::~Web() = default;
bool Web::is_built_in() { return false; }
uint64_t Web::start(WebRequest) { return 0; }
std::vector<WebAnswer> Web::wait(std::chrono::milliseconds) { return {}; }
size_t Web::running() const { return 0; }

}  // namespace kt::inline hub
