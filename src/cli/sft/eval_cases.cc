#include "cli/sft/eval_cases.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "text/jinja/characters.h"

namespace kt::inline cli {
namespace {

constexpr size_t kUsualLetters = 4, kMostLetters = 26;
constexpr size_t kShownReason = 120;

ChatTemplate template_of(const DescribedModel& model) {
  if (model.chat_template().empty())
    fail("{} has no chat template, which says how messages become text", model.path());
  return ChatTemplate(model.chat_template(), model.path());
}

// The conversation whole, and how many of its messages come before the answer.
struct Conversation {
  OrderedJson messages;
  size_t before = 0;
};

Conversation conversation_of(const Row& row) {
  const OrderedJson& answer = row.chosen.is_null() ? row.answer : row.chosen;
  if (answer.is_null()) return {.messages = row.messages, .before = row.messages.size() - 1};
  Conversation out{.messages = row.messages};
  for (const OrderedJson& one : answer) out.messages.push_back(one);
  out.before = out.messages.size() - 1;
  return out;
}

std::string_view stripped(std::string_view string) { return jinja::strip_space(string, jinja::Side::kBoth); }

}  // namespace

EvalCases::EvalCases(const DescribedModel& model, const EvalCaseOptions& options)
    : model_(model), options_(options), template_(template_of(model)) {}

std::string EvalCases::render(const OrderedJson& messages, const OrderedJson& tools, bool prompt) const {
  TemplateVariables variables = model_.template_tokens();
  variables["messages"] = messages;
  variables["tools"] = tools;
  variables["documents"] = nullptr;
  variables["add_generation_prompt"] = prompt;
  if (options_.thinking) variables["enable_thinking"] = *options_.thinking;
  return template_.render(variables);
}

// Of a template whose generation prompt says more than a finished turn has ("<think>"). Empty: what stands before the
// answer changes when it follows.
std::string EvalCases::common_head(const OrderedJson& before, const OrderedJson& tools,
                                   const std::string& prompt, const std::string& whole) const {
  const std::string plain = render(before, tools, false);
  if (!whole.starts_with(plain)) return "";
  size_t same = plain.size();
  while (same < std::min(prompt.size(), whole.size()) && prompt[same] == whole[same]) ++same;
  while (same > plain.size() && same < whole.size() && (static_cast<uint8_t>(whole[same]) & 0xC0) == 0x80)
    --same;  // to the beginning of a character
  return whole.substr(0, same);
}

// Without a generation prompt the words before an answer would be asked of the model.
void EvalCases::check_prompt(const OrderedJson& answer, const OrderedJson& before, const OrderedJson& tools,
                             std::string_view rest) const {
  constexpr size_t kBeginning = 32;
  if (answer.contains("tool_calls") || !answer["content"].is_string()) return;
  const std::string content = answer["content"].get<std::string>();
  const std::string_view said = stripped(content);
  if (jinja::strip_space(rest, jinja::Side::kLeft).starts_with(said.substr(0, kBeginning))) return;
  if (render(before, tools, true) == render(before, tools, false))
    fail(
        "{}: the chat template has no generation prompt: with add_generation_prompt it writes the same as "
        "without, so where "
        "an answer begins cannot be told",
        model_.path());
}

// The first token that has a byte of the answer. Where tokens do not spell the text byte by byte it is the first one
// that the head alone does not have.
size_t EvalCases::answer_begin(const std::string& whole, const std::string& head,
                               const std::vector<TokenId>& ids) const {
  size_t bytes = 0;
  for (const TokenId id : ids) bytes += model_.tokenizer().token_bytes(id).size();
  if (bytes == whole.size()) {
    size_t at = 0, end = 0;
    while (at < ids.size() && (end += model_.tokenizer().token_bytes(ids[at]).size()) <= head.size()) ++at;
    return at;
  }
  const std::vector<TokenId> alone = model_.tokenizer().encode(head);
  return static_cast<size_t>(std::ranges::mismatch(alone, ids).in1 - alone.begin());
}

// Of a template that does not say where an answer ends.
void EvalCases::add_end(std::vector<TokenId>& ids) const {
  const auto& names = model_.template_tokens();
  const auto end = names.find("eos_token");
  if (end == names.end() || !end->is_string() || ids.empty()) return;
  const auto added = model_.tokenizer().added_tokens();
  const bool ends = model_.tokenizer().is_special(ids.back()) ||
                    std::ranges::any_of(added, [&](const AddedToken& one) { return one.id == ids.back(); });
  if (const auto id = model_.tokenizer().id_of(end->get<std::string>()); id && !ends) ids.push_back(*id);
}

// A row of multiple choice has an answer that is one letter: of A to D, or of as many as its column `choices` has.
void EvalCases::add_letters(const Row& row, EvalCase& out) {
  const std::string_view label = stripped(out.label);
  size_t count = row.choices.is_array() ? std::min(row.choices.size(), kMostLetters) : kUsualLetters;
  if (count < 2) count = kUsualLetters;
  if (label.size() != 1 || label[0] < 'A' || label[0] >= static_cast<char>('A' + static_cast<int>(count)))
    return;
  std::vector<TokenId> ids;
  for (size_t i = 0; i < count; ++i) {
    const std::vector<TokenId> spelled =
        model_.tokenizer().encode(std::string(1, static_cast<char>('A' + static_cast<int>(i))));
    if (!spelled.empty()) ids.push_back(spelled.back());
  }
  if (std::set<TokenId>(ids.begin(), ids.end()).size() != count) {
    letters_unknown_ = true;
    return;
  }
  for (size_t i = 0; i < count; ++i) out.letters += static_cast<char>('A' + static_cast<int>(i));
  out.right = static_cast<size_t>(label[0] - 'A');
  out.tokens.choices = std::move(ids);
}

std::optional<EvalCase> EvalCases::make(const Row& row, DroppedRows& dropped) {
  const auto drop = [&](const std::string& why) {
    dropped.add(row.file, row.number, why);
    return std::nullopt;
  };
  if (!row.wanted) return drop("an answer that was not wanted");
  const Conversation all = conversation_of(row);
  const OrderedJson before(
      OrderedJson::array_t(all.messages.begin(), all.messages.begin() + static_cast<ptrdiff_t>(all.before)));
  EvalCase out{.file = row.file, .number = row.number};
  std::string whole, head;
  try {
    whole = jinja::strip_space(render(all.messages, row.tools, false), jinja::Side::kRight);
    out.prompt = render(before, row.tools, true);
    head = whole.starts_with(out.prompt) ? out.prompt : common_head(before, row.tools, out.prompt, whole);
  } catch (const Error& error) {
    return drop(text("the chat template refuses it ({})", printable(error.what(), kShownReason)));
  }
  if (out.prompt.empty()) return drop("the chat template gives no prompt for it");
  check_prompt(all.messages.back(), before, row.tools, std::string_view(whole).substr(head.size()));
  if (head.empty())
    return drop("the chat template refuses it (what stands before the answer changes when it follows)");
  out.tokens.prompt = model_.tokenizer().encode(out.prompt);
  out.tokens.whole = model_.tokenizer().encode(whole);
  const size_t begin = answer_begin(whole, head, out.tokens.whole);
  add_end(out.tokens.whole);
  const auto cutoff = static_cast<size_t>(options_.cutoff);
  if (std::max(out.tokens.prompt.size(), begin) >= cutoff)
    return drop(text("longer than cutoff_len {} before its answer begins", options_.cutoff));
  out.tokens.answer_begins = std::max<size_t>(begin, 1);  // the first token is predicted from nothing
  const OrderedJson& said = all.messages.back();
  if (said.contains("content") && said["content"].is_string()) out.label = said["content"].get<std::string>();
  if (stripped(out.label).empty())  // calls of tools: as the template writes them
    out.label = model_.tokenizer().decode(std::span(out.tokens.whole).subspan(out.tokens.answer_begins));
  if (out.tokens.whole.size() > cutoff) {
    ++cut_;
    out.tokens.whole.resize(cutoff);
  }
  add_letters(row, out);
  return out;
}

}  // namespace kt::inline cli
