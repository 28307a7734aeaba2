#include "cli/help/flag_words.h"

#include <algorithm>

namespace kt::inline cli {
namespace {

// "--max-memory" for "max_memory"; empty if no verb on the way to the one that was named has it.
std::string flag_of(std::string word, const CLI::App& app) {
  if (word.empty() || word.find_first_not_of("abcdefghijklmnopqrstuvwxyz_") != word.npos) return "";
  std::ranges::replace(word, '_', '-');
  const std::string flag = "--" + word;
  const CLI::App* at = &app;
  while (true) {
    if (at->get_option_no_throw(flag)) return flag;
    const auto below = at->get_subcommands();  // those that were parsed
    if (below.empty()) return "";
    at = below.front();
  }
}

}  // namespace

std::string with_flags(const std::string& message, const CLI::App& app) {
  std::string out;
  size_t at = 0;
  while (true) {
    const size_t begin = message.find('`', at);
    const size_t end = begin == message.npos ? begin : message.find('`', begin + 1);
    if (end == message.npos) return out + message.substr(at);
    const std::string flag = flag_of(message.substr(begin + 1, end - begin - 1), app);
    out += message.substr(at, begin - at);
    if (flag.empty()) {  // the second backtick may begin a word, too
      out += message.substr(begin, end - begin);
      at = end;
    } else {
      out += flag;
      at = end + 1;
    }
  }
}

}  // namespace kt::inline cli
