// TLS beneath HTTP: a value between the bytes of the wire and the bytes that are meant. It holds no socket, so that
// whoever owns one keeps its own loop, deadlines and limits. Through OpenSSL where the build has it
// (backend/tls_openssl.cc); elsewhere what makes a session says that there is none (backend/tls_none.cc).
#pragma once
#include <memory>
#include <string>
#include <string_view>

namespace kt::inline http {

// One side of one connection. One thread at a time.
class TlsSession {
 public:
  virtual ~TlsSession() = default;

  // Takes bytes that came over the wire, also none: a client's first call begins the handshake. What they mean is
  // appended to `plain`, what has to be sent for them to `wire`, also where failure() says something afterwards: an
  // alert that tells the other side why.
  virtual void receive(std::string_view bytes, std::string& plain, std::string& wire) = 0;
  // Appends `plain` to `wire` as the other side can read it. Only while open().
  virtual void seal(std::string_view plain, std::string& wire) = 0;
  // Appends what tells the other side that no more will come; nothing where that cannot be said.
  virtual void end(std::string& wire) = 0;

  virtual bool open() const = 0;                   // the handshake is done, and nothing has failed
  virtual bool ended() const = 0;                  // the other side has said that no more will come
  virtual const std::string& failure() const = 0;  // one line; "": none
};

// PEM files: a certificate with those that sign it behind, and the key of the first.
struct TlsFiles {
  std::string certificate, key;
};

// What a server shows to its clients.
class TlsServer {
 public:
  // Error(kInput) that names the file for one that cannot be read or is no such thing, and both for two that do not
  // belong together; Error(kUnsupported) in a build without TLS. A certificate that has run out, or runs out within
  // days, is logged as a warning.
  explicit TlsServer(TlsFiles files);
  ~TlsServer();
  // Reads the files again, for sessions that begin from now on. After an Error all is as it was.
  void reload();
  std::unique_ptr<TlsSession> session() const;  // any thread

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Whom a client believes.
class TlsTrust {
 public:
  // The authorities in a PEM file; "": the system's, or what SSL_CERT_FILE and SSL_CERT_DIR name. Errors as above.
  explicit TlsTrust(const std::string& ca_file = "");
  ~TlsTrust();
  // The session fails if the server cannot show a certificate for `host`, a name or an address.
  std::unique_ptr<TlsSession> session(const std::string& host) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt::inline http
