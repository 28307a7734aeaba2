// TLS 1.2 and 1.3 through OpenSSL 3, between buffers in memory: nothing here waits for a socket.
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/utf8.h"
#include "http/tls.h"

namespace kt::inline http {
namespace {

template <auto kFree>
struct Freed {
  template <typename T>
  void operator()(T* what) const {
    kFree(what);
  }
};
using Context = std::unique_ptr<SSL_CTX, Freed<SSL_CTX_free>>;
using Ssl = std::unique_ptr<SSL, Freed<SSL_free>>;
using Bio = std::unique_ptr<BIO, Freed<BIO_free>>;
using Certificate = std::unique_ptr<X509, Freed<X509_free>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;
using Names = std::unique_ptr<GENERAL_NAMES, Freed<GENERAL_NAMES_free>>;

constexpr size_t kRecord = 16 << 10;  // bytes that one record holds
constexpr size_t kMostPem = 1 << 20;  // bytes of a file of certificates, of which the system's has a quarter
constexpr size_t kMostNames = 4;      // of a certificate, in an error
constexpr int kSoon = 7 * 24 * 3600;  // seconds before the end of a certificate that are worth a warning
constexpr unsigned char kHttp11[] = {8, 'h', 't', 't', 'p', '/', '1', '.', '1'};

// Why the last call failed, in OpenSSL's words; the queue is empty afterwards.
std::string library_reason() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  const char* const reason = code != 0 ? ERR_reason_error_string(code) : nullptr;
  return reason ? reason : "no reason given";
}

Context new_context(const SSL_METHOD* method) {
  Context out(SSL_CTX_new(method));
  if (!out) fail_as(ErrorKind::kMemory, "TLS: {}", library_reason());
  SSL_CTX_set_min_proto_version(out.get(), TLS1_2_VERSION);
  SSL_CTX_set_options(out.get(), SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
  SSL_CTX_set_mode(out.get(), SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_session_cache_mode(out.get(), SSL_SESS_CACHE_OFF);
  return out;
}

std::string name_text(const GENERAL_NAME& name) {
  if (name.type == GEN_DNS) {
    const auto* letters = reinterpret_cast<const char*>(ASN1_STRING_get0_data(name.d.dNSName));
    return printable({letters, static_cast<size_t>(ASN1_STRING_length(name.d.dNSName))});
  }
  if (name.type != GEN_IPADD) return "";
  const unsigned char* const bytes = ASN1_STRING_get0_data(name.d.iPAddress);
  const int count = ASN1_STRING_length(name.d.iPAddress);
  if (count == 4) return text("{}.{}.{}.{}", +bytes[0], +bytes[1], +bytes[2], +bytes[3]);
  std::string out;
  for (int i = 0; i + 1 < count; i += 2) {
    std::array<char, 8> group{};
    std::snprintf(group.data(), group.size(), "%s%x", i > 0 ? ":" : "", bytes[i] << 8 | bytes[i + 1]);
    out += group.data();
  }
  return out;
}

// "a.example, b.example": whom a certificate is for.
std::string names_of(const X509* certificate) {
  const Names all(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  std::string out;
  size_t shown = 0;
  for (int i = 0; all && i < sk_GENERAL_NAME_num(all.get()); ++i) {
    const std::string one = name_text(*sk_GENERAL_NAME_value(all.get(), i));
    if (one.empty()) continue;
    if (++shown > kMostNames) return out + ", ...";
    out += (out.empty() ? "" : ", ") + one;
  }
  return out.empty() ? "nobody by name" : out;
}

std::string day_of(const ASN1_TIME* when) {
  std::tm parts{};
  std::array<char, 32> out{};
  if (ASN1_TIME_to_tm(when, &parts) != 1 || std::strftime(out.data(), out.size(), "%F", &parts) == 0)
    return "an unknown day";
  return out.data();
}

class OpenSslSession final : public TlsSession {
 public:
  enum class Side { kServer, kClient };
  OpenSslSession(SSL_CTX* context, Side side) : ssl_(SSL_new(context)) {
    Bio in(BIO_new(BIO_s_mem())), out(BIO_new(BIO_s_mem()));
    if (!ssl_ || !in || !out) fail_as(ErrorKind::kMemory, "TLS: {}", library_reason());
    in_ = in.get();
    out_ = out.get();
    SSL_set_bio(ssl_.get(), in.release(), out.release());
    SSL_set_app_data(ssl_.get(), this);
    if (side == Side::kServer)
      SSL_set_accept_state(ssl_.get());
    else
      SSL_set_connect_state(ssl_.get());
  }

  // The server must show a certificate for this name.
  void expect(const std::string& host) {
    host_ = host;
    X509_VERIFY_PARAM* const wanted = SSL_get0_param(ssl_.get());
    X509_VERIFY_PARAM_set_hostflags(wanted, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    bool set = X509_VERIFY_PARAM_set1_ip_asc(wanted, host.c_str()) == 1;
    if (!set)
      set = X509_VERIFY_PARAM_set1_host(wanted, host.c_str(), host.size()) == 1 &&
            SSL_set_tlsext_host_name(ssl_.get(), host.c_str()) == 1;
    ERR_clear_error();  // a name is no address
    if (!set) fail("\"{}\": no certificate can be for that name", printable(host));
    SSL_set_verify(ssl_.get(), SSL_VERIFY_PEER, note_refusal);
  }

  void receive(std::string_view bytes, std::string& plain, std::string& wire) override {
    if (!failure_.empty()) return;
    ERR_clear_error();
    if (first_ == '\0' && !bytes.empty()) first_ = bytes.front();
    KT_CHECK(bytes.size() <= INT_MAX, "{} bytes at once", bytes.size());
    if (!bytes.empty() && BIO_write(in_, bytes.data(), static_cast<int>(bytes.size())) < 0)
      fail_as(ErrorKind::kMemory, "TLS: {}", library_reason());
    if (open_ || shake_hands()) read_all(plain);
    take_out(wire);
  }

  void seal(std::string_view plain, std::string& wire) override {
    KT_CHECK(open(), "a TLS session that is not open has something to send");
    ERR_clear_error();
    wire.reserve(wire.size() + plain.size() + plain.size() / 256 + 64);
    while (!plain.empty() && failure_.empty()) {
      const std::string_view piece = plain.substr(0, kRecord);
      if (SSL_write(ssl_.get(), piece.data(), static_cast<int>(piece.size())) <= 0)
        failure_ = text("TLS: {}", library_reason());
      plain.remove_prefix(piece.size());
      take_out(wire);
    }
  }

  void end(std::string& wire) override {
    if (!open()) return;
    SSL_shutdown(ssl_.get());
    ERR_clear_error();
    take_out(wire);
  }

  bool open() const override { return open_ && failure_.empty(); }
  bool ended() const override { return ended_; }
  const std::string& failure() const override { return failure_; }

 private:
  // True once it is done.
  bool shake_hands() {
    const int done = SSL_do_handshake(ssl_.get());
    if (done == 1) return open_ = true;
    if (SSL_get_error(ssl_.get(), done) != SSL_ERROR_WANT_READ) failure_ = handshake_failure();
    return false;
  }

  void read_all(std::string& plain) {
    std::array<char, kRecord> buffer;
    int n = 0;
    while ((n = SSL_read(ssl_.get(), buffer.data(), static_cast<int>(buffer.size()))) > 0)
      plain.append(buffer.data(), static_cast<size_t>(n));
    const int why = SSL_get_error(ssl_.get(), n);
    if (why == SSL_ERROR_ZERO_RETURN)
      ended_ = true;
    else if (why != SSL_ERROR_WANT_READ)
      failure_ = text("TLS: {}", library_reason());
  }

  void take_out(std::string& wire) {
    const size_t waiting = BIO_ctrl_pending(out_), before = wire.size();
    if (waiting == 0) return;
    wire.resize(before + waiting);
    const int n = BIO_read(out_, wire.data() + before, static_cast<int>(waiting));
    wire.resize(before + static_cast<size_t>(std::max(n, 0)));
  }

  std::string handshake_failure() {
    if (!refusal_.empty()) {
      ERR_clear_error();
      return refusal_;
    }
    const std::string reason = library_reason();
    constexpr char kHandshake = 22, kAlert = 21;  // records that a handshake begins with
    if (first_ != kHandshake && first_ != kAlert) return "it does not speak TLS; is it an http:// server?";
    return text("no TLS connection: {}", reason);
  }

  // OpenSSL has looked at a certificate of the server's chain.
  static int note_refusal(int fine, X509_STORE_CTX* at) {
    if (fine) return fine;
    const auto* ssl = static_cast<SSL*>(X509_STORE_CTX_get_ex_data(at, SSL_get_ex_data_X509_STORE_CTX_idx()));
    auto* session = static_cast<OpenSslSession*>(SSL_get_app_data(ssl));
    const X509* certificate = X509_STORE_CTX_get_current_cert(at);
    if (session->refusal_.empty())
      session->refusal_ = session->refusal_of(X509_STORE_CTX_get_error(at), certificate);
    return fine;
  }

  std::string refusal_of(int error, const X509* certificate) const {
    switch (error) {
      case X509_V_ERR_HOSTNAME_MISMATCH:
      case X509_V_ERR_IP_ADDRESS_MISMATCH:
        return text("its certificate is not for {} but for {}", host_,
                    certificate ? names_of(certificate) : "nobody");
      case X509_V_ERR_CERT_HAS_EXPIRED:
        return text("its certificate ran out on {}", day_of(X509_get0_notAfter(certificate)));
      case X509_V_ERR_CERT_NOT_YET_VALID:
        return text("its certificate is good from {} on; is this machine's clock right?",
                    day_of(X509_get0_notBefore(certificate)));
      default:
        return text(
            "its certificate is not trusted: {}; give its authority's with `ca_file` or SSL_CERT_FILE",
            X509_verify_cert_error_string(error));
    }
  }

  Ssl ssl_;
  BIO *in_ = nullptr, *out_ = nullptr;  // ssl_'s
  std::string host_, failure_;
  std::string refusal_;  // of a certificate
  char first_ = '\0';    // byte that came
  bool open_ = false, ended_ = false;
};

Bio pem_of(const std::string& path, std::string& bytes) {
  bytes = read_file(path, kMostPem);
  Bio out(BIO_new_mem_buf(bytes.data(), static_cast<int>(bytes.size())));
  if (!out) fail_as(ErrorKind::kMemory, "TLS: {}", library_reason());
  return out;
}

// Nobody is asked for a password.
int no_password(char*, int, int, void* asked) {
  *static_cast<bool*>(asked) = true;
  return -1;
}

std::vector<Certificate> read_chain(const std::string& path) {
  std::string bytes;
  const Bio pem = pem_of(path, bytes);
  std::vector<Certificate> out;
  bool asked = false;
  while (Certificate one{PEM_read_bio_X509(pem.get(), nullptr, no_password, &asked)})
    out.push_back(std::move(one));
  const bool whole = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  const std::string reason = library_reason();
  if (out.empty()) fail("{}: expected a certificate in PEM (-----BEGIN CERTIFICATE-----)", path);
  if (!whole) fail("{}: certificate {} of the file cannot be read: {}", path, out.size() + 1, reason);
  return out;
}

PrivateKey read_key(const std::string& path) {
  std::string bytes;
  const Bio pem = pem_of(path, bytes);
  bool asked = false;
  PrivateKey out(PEM_read_bio_PrivateKey(pem.get(), nullptr, no_password, &asked));
  OPENSSL_cleanse(bytes.data(), bytes.size());
  ERR_clear_error();
  if (asked) fail("{}: the key is locked with a password, and there is nobody to ask for it", path);
  if (!out) fail("{}: expected a private key in PEM (-----BEGIN PRIVATE KEY-----)", path);
  return out;
}

void warn_of_end(const X509* certificate, const std::string& path) {
  const ASN1_TIME *const end = X509_get0_notAfter(certificate), *const begin =
                                                                    X509_get0_notBefore(certificate);
  if (X509_cmp_current_time(begin) > 0)
    KT_LOG(LogLevel::kWarning, "{}: the certificate is good from {} on; is this machine's clock right?", path,
           day_of(begin));
  int days = 0, seconds = 0;
  if (ASN1_TIME_diff(&days, &seconds, nullptr, end) != 1) return;
  const int64_t left = int64_t{days} * 24 * 3600 + seconds;
  if (left < kSoon)
    KT_LOG(LogLevel::kWarning, "{}: the certificate {} on {}", path, left < 0 ? "ran out" : "runs out",
           day_of(end));
}

int choose_http(SSL*, const unsigned char** out, unsigned char* size, const unsigned char* offered,
                unsigned length, void*) {
  unsigned char* chosen = nullptr;
  if (SSL_select_next_proto(&chosen, size, kHttp11, sizeof kHttp11, offered, length) !=
      OPENSSL_NPN_NEGOTIATED)
    return SSL_TLSEXT_ERR_NOACK;  // HTTP/1.1 is what there is
  *out = chosen;
  return SSL_TLSEXT_ERR_OK;
}

Context server_context(const TlsFiles& files) {
  Context out = new_context(TLS_server_method());
  std::vector<Certificate> chain = read_chain(files.certificate);
  const PrivateKey key = read_key(files.key);
  if (X509_check_private_key(chain.front().get(), key.get()) != 1) {
    ERR_clear_error();
    fail("{} and {} do not belong together: the key is not that of the certificate", files.certificate,
         files.key);
  }
  if (SSL_CTX_use_certificate(out.get(), chain.front().get()) != 1)
    fail("{}: {}", files.certificate, library_reason());
  if (SSL_CTX_use_PrivateKey(out.get(), key.get()) != 1) fail("{}: {}", files.key, library_reason());
  for (size_t i = 1; i < chain.size(); ++i)
    if (SSL_CTX_add1_chain_cert(out.get(), chain[i].get()) != 1)
      fail("{}: certificate {}: {}", files.certificate, i + 1, library_reason());
  SSL_CTX_set_options(out.get(), SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_alpn_select_cb(out.get(), choose_http, nullptr);
  warn_of_end(chain.front().get(), files.certificate);
  return out;
}

}  // namespace

struct TlsServer::State {
  explicit State(TlsFiles of) : files(std::move(of)) {}
  const TlsFiles files;
  std::mutex mutex;
  Context context;  // under mutex
};

TlsServer::TlsServer(TlsFiles files) : state_(std::make_unique<State>(std::move(files))) { reload(); }
TlsServer::~TlsServer() = default;

void TlsServer::reload() {
  Context made = server_context(state_->files);
  const std::lock_guard lock(state_->mutex);
  std::swap(state_->context, made);  // sessions that run hold the old one
}

std::unique_ptr<TlsSession> TlsServer::session() const {
  const std::lock_guard lock(state_->mutex);
  return std::make_unique<OpenSslSession>(state_->context.get(), OpenSslSession::Side::kServer);
}

struct TlsTrust::State {
  Context context;
};

TlsTrust::TlsTrust(const std::string& ca_file)
    : state_(std::make_unique<State>(State{new_context(TLS_client_method())})) {
  SSL_CTX* const context = state_->context.get();
  SSL_CTX_set_alpn_protos(context, kHttp11, sizeof kHttp11);
  if (ca_file.empty()) {
    SSL_CTX_set_default_verify_paths(context);
    ERR_clear_error();  // a store that is not there trusts nobody, which the handshake says
    return;
  }
  // Also a certificate that is no authority's: it stands for itself.
  X509_VERIFY_PARAM_set_flags(SSL_CTX_get0_param(context), X509_V_FLAG_PARTIAL_CHAIN);
  for (const Certificate& one : read_chain(ca_file))
    if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context), one.get()) != 1)
      fail("{}: {}", ca_file, library_reason());
}
TlsTrust::~TlsTrust() = default;

std::unique_ptr<TlsSession> TlsTrust::session(const std::string& host) const {
  auto out = std::make_unique<OpenSslSession>(state_->context.get(), OpenSslSession::Side::kClient);
  out->expect(host);
  return out;
}

}  // namespace kt::inline http
