// A build without OpenSSL: who asks for TLS is told so.
#include "base/error.h"
#include "http/tls.h"

namespace kt::inline http {
namespace {

[[noreturn]] void fail_without_tls() {
  fail_as(ErrorKind::kUnsupported,
          "this program was built without TLS: https needs one built with OpenSSL (libssl-dev), or a proxy "
          "before the "
          "server that speaks it");
}

}  // namespace

struct TlsServer::State {};
TlsServer::TlsServer(TlsFiles) { fail_without_tls(); }
TlsServer::~TlsServer() = default;
void TlsServer::reload() { fail_without_tls(); }
std::unique_ptr<TlsSession> TlsServer::session() const { fail_without_tls(); }

struct TlsTrust::State {};
TlsTrust::TlsTrust(const std::string&) { fail_without_tls(); }
TlsTrust::~TlsTrust() = default;
std::unique_ptr<TlsSession> TlsTrust::session(const std::string&) const { fail_without_tls(); }

}  // namespace kt::inline http
