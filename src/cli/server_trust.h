// Whom verbs that talk to a server over https believe.
#pragma once
#include <memory>
#include <string>

#include "http/tls.h"

namespace kt::inline cli {

inline constexpr const char* kCaFileHelp =
    "For https: trust what the certificates of this PEM file sign; default: the system's authorities, or "
    "SSL_CERT_FILE";

// Null: the system's, which are read where a server is asked over https.
inline std::shared_ptr<const TlsTrust> trust_of(const std::string& ca_file) {
  return ca_file.empty() ? nullptr : std::make_shared<const TlsTrust>(ca_file);
}

}  // namespace kt::inline cli
