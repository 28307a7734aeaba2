// What a call refuses, for tests.
#pragma once
#include <string>

#include "base/error.h"

namespace kt::inline base {

// The message of the Error that the call throws; "no error" if it returns. Other exceptions pass through.
template <typename Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace kt::inline base
