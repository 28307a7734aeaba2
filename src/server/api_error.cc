#include "server/api_error.h"

#include <nlohmann/json.hpp>

namespace kt::inline server {
namespace {

std::string_view type_of(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

}  // namespace

std::string error_body(int status, std::string_view message, std::string_view param) {
  nlohmann::ordered_json error = {{"message", message}, {"type", type_of(status)}};
  error["param"] = param.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(param);
  error["code"] = status;
  return nlohmann::ordered_json{{"error", error}}.dump(-1, ' ', false,
                                                       nlohmann::json::error_handler_t::replace);
}

std::string messages_error_body(int status, std::string_view message) {
  const nlohmann::ordered_json error = {
      {"type", type_of(status)}, {"message", message}, {"param", nullptr}, {"code", status}};
  return nlohmann::ordered_json{{"type", "error"}, {"error", error}}.dump(
      -1, ' ', false, nlohmann::json::error_handler_t::replace);
}

HttpReply error_reply(int status, std::string_view message, std::string_view param) {
  return {.status = status, .body = error_body(status, message, param)};
}

}  // namespace kt::inline server
