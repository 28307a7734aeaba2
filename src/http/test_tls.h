// Certificates for tests, made when they are needed by the program openssl, and a bare TLS client.
#pragma once
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "http/test_socket.h"
#include "http/tls.h"

namespace kt::inline http {

// A folder of key pairs, gone with this.
class TestCertificates {
 public:
  TestCertificates() {
    std::string path = (std::filesystem::temp_directory_path() / "kt_tls_XXXXXX").string();
    if (::mkdtemp(path.data())) folder_ = path;
  }
  ~TestCertificates() { std::filesystem::remove_all(folder_); }

  static bool can_be_made() { return std::system("openssl version > /dev/null 2>&1") == 0; }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  // NAME.pem and NAME.key: a certificate that signs itself, for "DNS:localhost,IP:127.0.0.1" or the like.
  TlsFiles make(const std::string& name, const std::string& subjects,
                const std::string& more = "-days 30") const {
    const TlsFiles out{path(name + ".pem"), path(name + ".key")};
    run("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes " + more + " -subj /CN=" + name +
        " -addext subjectAltName=" + subjects + " -keyout " + out.key + " -out " + out.certificate);
    return out;
  }
  void run(const std::string& arguments) const {
    const std::string command = "openssl " + arguments + " 2> " + path("log");
    if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
  }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name)) << bytes;
    return path(name);
  }

 private:
  std::string folder_ = "/nonexistent";
};

// Bytes through TLS over a TestSocket.
class TestTlsSocket {
 public:
  TestTlsSocket(int port, const TlsTrust& trust) : socket(port), tls(trust.session("127.0.0.1")) {
    std::string wire;
    tls->receive({}, got, wire);
    while (socket.write(wire) && !tls->open() && tls->failure().empty() && read_once(wire)) {
    }
  }
  bool write(std::string_view bytes) {
    std::string wire;
    tls->seal(bytes, wire);
    return socket.write(wire);
  }
  // Until `what` has come, or the connection ends.
  const std::string& read_until(std::string_view what) {
    std::string wire;
    while (got.find(what) == std::string::npos && read_once(wire)) {
    }
    return got;
  }
  const std::string& read_all() { return read_until(std::string(1, '\0')); }
  void half_close() {
    std::string wire;
    tls->end(wire);
    socket.write(wire);
    socket.half_close();
  }

  TestSocket socket;
  std::unique_ptr<TlsSession> tls;
  std::string got;

 private:
  bool read_once(std::string& wire) {
    std::array<char, 16384> buffer;
    const ssize_t n = recv(socket.fd(), buffer.data(), buffer.size(), 0);
    wire.clear();
    if (n <= 0) return false;
    tls->receive({buffer.data(), static_cast<size_t>(n)}, got, wire);
    return true;
  }
};

}  // namespace kt::inline http
