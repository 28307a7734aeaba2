#include "cli/command_words.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "base/error.h"
#include "cli/home.h"
#include "cli/sglang_flags.h"
#include "terminal/language.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

// As CLI11 sees it: "-1" is a number.
bool is_flag(std::string_view word) {
  return word.size() > 1 && word[0] == '-' && word != "--" && !(word[1] >= '0' && word[1] <= '9');
}

// Of a verb, or of what is above it.
const CLI::Option* option_of(const CLI::App& verb, const std::string& flag) {
  for (const CLI::App* at = &verb; at; at = at->get_parent())
    if (const CLI::Option* const option = at->get_option_no_throw(flag)) return option;
  return nullptr;
}

const CLI::App* verb_of(const CLI::App& above, const std::string& word) {
  const auto found = above.get_subcommands([&](const CLI::App* one) { return one->check_name(word); });
  return found.empty() ? nullptr : found.front();
}

class Teller {
 public:
  Teller(const CLI::App& app, const Words& words) : words_(words) {
    out_.verb = &app;
    out_.path = app.get_name();
  }

  CommandWords tell() {
    while (at_ < words_.size()) {
      const std::string& word = words_[at_];
      if (word == "--") {
        out_.groups.push_back({.begin = at_, .end = at_ + 1, .flag = word});
        ++at_;
        while (at_ < words_.size()) take_alone();
      } else if (is_flag(word)) {
        take_flag(word);
      } else if (const CLI::App* const verb = verb_of(*out_.verb, word)) {
        out_.verb = verb;
        out_.path += " " + word;
        ++at_;
      } else {
        take_alone();
      }
    }
    return std::move(out_);
  }

 private:
  void take_alone() {
    out_.groups.push_back({.begin = at_, .end = at_ + 1});
    ++at_;
  }

  void take_flag(const std::string& word) {
    const bool is_long = word.starts_with("--");
    const size_t equals = is_long ? word.find('=') : std::string::npos;
    std::string flag = is_long ? word.substr(0, equals) : word.substr(0, 2);
    const CLI::Option* option = option_of(*out_.verb, flag);
    // "-vq" is two flags where the first takes no value.
    size_t told = 2;
    for (; !is_long && option && option->get_items_expected_max() == 0 && told < word.size(); ++told) {
      flag = {'-', word[told]};
      option = option_of(*out_.verb, flag);
    }
    const bool has_value = equals != std::string::npos ||
                           (!is_long && option && told < word.size() && option->get_items_expected_max() > 0);
    const auto foreign = !option && out_.path == "kt run" ? sglang_flag(flag) : std::optional<FlagValues>();
    WordGroup group{
        .begin = at_, .end = at_ + 1, .flag = flag, .option = option, .foreign = foreign.has_value()};
    ++at_;
    if (option && !has_value) take_values(*option);
    if (foreign && !has_value) take_values(*foreign);
    group.end = at_;
    out_.groups.push_back(std::move(group));
  }

  bool is_value() const {
    return at_ < words_.size() && words_[at_] != "--" && !is_flag(words_[at_]) &&
           !verb_of(*out_.verb, words_[at_]);
  }

  // What must be there is taken whatever it looks like.
  void take_values(const CLI::Option& option) {
    const int least = std::min(option.get_type_size_min(), option.get_items_expected_min());
    for (int i = 0; i < least && at_ < words_.size(); ++i) ++at_;
    if (option.get_items_expected_max() <= least) return;
    for (int i = least; i < option.get_items_expected_max() && option.get_allow_extra_args() && is_value();
         ++i)
      ++at_;
  }

  void take_values(FlagValues values) {
    const size_t most = values == FlagValues::kNone ? 0 : values == FlagValues::kMany ? words_.size() : 1;
    for (size_t i = 0; i < most && is_value(); ++i) ++at_;
  }

  const Words& words_;
  CommandWords out_;
  size_t at_ = 0;
};

// Flags that a user of the verb may have meant.
std::vector<std::string> names_of(const CLI::App& verb) {
  std::vector<std::string> out;
  for (const CLI::App* at = &verb; at; at = at->get_parent())
    for (const CLI::Option* option : at->get_options()) {
      if (option->get_group().empty()) continue;
      for (const std::string& name : option->get_lnames()) out.push_back("--" + name);
    }
  return out;
}

[[noreturn]] void refuse(const CommandWords& all, const std::string& flag) {
  const std::string path = all.path;
  std::vector<std::string> known = names_of(*all.verb);
  if (path == "kt run") std::ranges::copy(sglang_flags(), std::back_inserter(known));
  const std::string nearest = flag.starts_with("--") ? nearest_name(flag, known) : "";
  if (nearest.empty()) fail(tr("unknown flag '{}'; see {} --help"), shown(flag), path);
  fail(tr("unknown flag '{}'; the nearest known one is {}; see {} --help"), shown(flag), nearest, path);
}

[[noreturn]] void refuse_model(const std::string& type, const std::string& word) {
  fail(tr("--type {}: a kernel is measured without a model, '{}' came; see kt microbench {} --help"), type,
       shown(word), type);
}

// `kt microbench -n 3 mla` with its component in front, where the parser wants it, and moe where none is named. Flags
// before it are read as moe's.
Words with_component(const CLI::App& app, Words words) {
  const size_t at = static_cast<size_t>(std::ranges::find(words, "microbench") - words.begin()) + 1;
  const CLI::App* const microbench = verb_of(app, "microbench");
  if (at < words.size() && verb_of(*microbench, words[at])) return words;
  Words with = words;
  with.insert(with.begin() + static_cast<ptrdiff_t>(at), "moe");
  bool unknown = false;  // a flag, whose value may look like a component's name
  for (const WordGroup& group : told_apart(app, with).groups) {
    if (group.flag == "--help" || group.flag == "-h") return words;
    unknown |= !group.flag.empty() && !group.option;
    if (!group.flag.empty()) continue;
    if (!verb_of(*microbench, with[group.begin])) return unknown ? with : words;  // an error either way
    with[at] = with[group.begin];
    with.erase(with.begin() + static_cast<ptrdiff_t>(group.begin));
    return with;
  }
  return with;
}

}  // namespace

CommandWords told_apart(const CLI::App& app, const Words& words) { return Teller(app, words).tell(); }

Words respelt(const CLI::App& app, Words words) {
  const CommandWords all = told_apart(app, words);
  if (all.path.starts_with("kt microbench")) return with_component(app, std::move(words));
  if (all.path != "kt bench") return words;
  for (const WordGroup& group : all.groups) {
    if (!group.option || !group.option->check_name("--type")) continue;
    std::string type = words[group.end - 1];
    if (group.end == group.begin + 1) type.erase(0, type.starts_with("--") ? group.flag.size() + 1 : 2);
    if (type != "moe" && type != "mla" && type != "linear" && type != "attention") continue;
    for (const WordGroup& other : all.groups)
      if (other.option && other.option->check_name("--model")) refuse_model(type, words[other.end - 1]);
    words.erase(words.begin() + static_cast<ptrdiff_t>(group.begin),
                words.begin() + static_cast<ptrdiff_t>(group.end));
    words[static_cast<size_t>(std::ranges::find(words, "bench") - words.begin())] = "microbench";
    words.insert(std::ranges::find(words, "microbench") + 1, type);
    const CommandWords kernel = told_apart(app, words);
    for (const WordGroup& other : kernel.groups) {
      if (!other.flag.empty() && !other.option) break;  // whose value it may be
      if (other.flag.empty()) refuse_model(type, words[other.begin]);
    }
    return words;
  }
  return words;
}

void take_out_ignored(const CLI::App& app, Words& words) {
  const CommandWords all = told_apart(app, words);
  // No verb, and a word that is none: the parser says so.
  const auto is_alone = [](const WordGroup& group) { return group.flag.empty(); };
  if (all.verb == &app && std::ranges::any_of(all.groups, is_alone)) return;
  Words kept;
  size_t done = 0;
  for (const WordGroup& group : all.groups) {
    kept.insert(kept.end(), words.begin() + static_cast<ptrdiff_t>(done),
                words.begin() + static_cast<ptrdiff_t>(group.foreign ? group.begin : group.end));
    done = group.end;
    const bool is_flag = !group.flag.empty() && group.flag != "--";
    if (is_flag && !group.option && !group.foreign) refuse(all, group.flag);
    if (!group.foreign) continue;
    const bool assigned = words[group.begin].find('=') != std::string::npos;
    const auto values = sglang_flag(group.flag);
    if (values == FlagValues::kNone && assigned) fail("{}: takes no value", words[group.begin]);
    if (values == FlagValues::kOne && !assigned && group.end == group.begin + 1)
      fail(tr("{}: expected a value behind it; see {} --help"), group.flag, all.path);
  }
  kept.insert(kept.end(), words.begin() + static_cast<ptrdiff_t>(done), words.end());
  words = std::move(kept);
}

}  // namespace kt::inline cli
