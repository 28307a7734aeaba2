// All that kt says to people, in Chinese: the one table behind tr().
#pragma once
#include <span>

#include "terminal/language.h"

namespace kt::inline cli {

std::span<const Translation> chinese_words();

}  // namespace kt::inline cli
