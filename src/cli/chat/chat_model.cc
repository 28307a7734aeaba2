// A chat's answers from a model in this process. The engine keeps the pages of earlier turns, so that a
// prompt which begins like the last one is not run again.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <random>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "cli/chat/chat_backend.h"
#include "engine/engine.h"
#include "nn/kv_cache.h"
#include "server/chat_prompt.h"
#include "server/prompt_guard.h"
#include "server/syntax/chat_syntax.h"
#include "text/chat_template.h"

namespace kt::inline cli {
namespace {

constexpr std::chrono::milliseconds kLook{20};  // how soon stop() is seen

// What the folder recommends, where it says something.
SamplingOptions recommended_sampling(const std::string& path) {
  SamplingOptions sampling;
  const std::string file = path + "/generation_config.json";
  std::error_code none;
  if (!std::filesystem::exists(file, none)) return sampling;
  const Json config = read_json(file);
  if (!config.is_object()) return sampling;
  const auto number = [&](const char* key, auto& value) {
    if (const auto found = config.find(key); found != config.end() && found->is_number())
      value = found->get<std::decay_t<decltype(value)>>();
  };
  number("temperature", sampling.temperature);
  number("top_p", sampling.top_p);
  number("top_k", sampling.top_k);
  if (const auto sample = config.find("do_sample"); sample != config.end() && *sample == false)
    sampling.temperature = 0;
  return sampling;
}

// An answer on its way from the engine's thread to the caller's.
class Mailbox {
 public:
  void put(const GenerateEvent& event) {
    const std::lock_guard lock(mutex_);
    text_ += event.text;
    if (event.finish) finish_ = *event.finish;
    arrived_.notify_one();
  }

  // What came since, after some time at most; true: and that was all.
  bool take(std::string& text, Finish& finish) {
    std::unique_lock lock(mutex_);
    arrived_.wait_for(lock, kLook, [this] { return !text_.empty() || finish_; });
    text = std::exchange(text_, {});
    if (!finish_) return false;
    finish = *finish_;
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::string text_;
  std::optional<Finish> finish_;
};

class ModelBackend final : public ChatBackend {
 public:
  ModelBackend(const std::string& path, ModelOptions options, int context)
      : model_(OpenedModel(path, std::move(options))
                   .load({.use = {.sequences = 1, .context = context, .snapshots = {}}})),
        context_(std::min(context, model_.spec().context)),
        template_(checked_template(model_), path),
        syntax_(chat_syntax_of(model_.chat_template(), model_.tokenizer())),
        runner_(model_.make_runner(ceil_div(context_, kPageTokens), {.snapshots = {}})),
        engine_(*runner_, &model_.tokenizer(), {.step_tokens = runner_->max_tokens(), .sequences = 1}),
        sampling_(recommended_sampling(path)) {}

  ChatPlace place() const override {
    const std::filesystem::path path(model_.path());
    const auto name = path.has_filename() ? path.filename() : path.parent_path().filename();
    return {.model = name.string(), .where = "this process", .context = context_};
  }

  void stop() noexcept override { stopped_.store(true); }

  ChatFinish stream(const std::vector<ChatMessage>& messages, const ChatOptions& options,
                    const std::function<void(const ChatPiece&)>& on_piece) override {
    stopped_.store(false);
    const auto mailbox = std::make_shared<Mailbox>();  // outlives an on_piece that throws
    Prompt prompt = prompt_of(messages);
    ReplyParser parser(syntax_, {.thinking = prompt.thinking});
    const auto pass_on = [&](const std::vector<ReplyPiece>& pieces) {
      for (const ReplyPiece& piece : pieces)
        on_piece({.text = piece.text, .reasoning = piece.kind == ReplyPiece::Kind::kReasoning});
    };
    GenerateRequest request{.prompt = std::move(prompt.ids),
                            .max_tokens = options.max_tokens.value_or(context_),
                            .sampling = sampling_of(options),
                            .end_tokens = model_.end_ids(),
                            .special = answer_decoding(syntax_, model_.tokenizer()),
                            .adapter = static_cast<int>(model_.adapters().size()) - 1};
    for (const TokenId end : answer_end_tokens(syntax_, model_.tokenizer()))
      request.end_tokens.push_back(end);
    request.on_event = [mailbox](const GenerateEvent& event) { mailbox->put(event); };
    const RequestId id = engine_.submit(std::move(request));
    struct Cancel {  // also when on_piece throws
      Engine& engine;
      RequestId id;
      ~Cancel() { engine.cancel(id); }
    } cancel{engine_, id};

    Finish finish;
    std::string text;
    for (bool ended = false; !ended;) {
      if (stopped_.load()) engine_.cancel(id);
      ended = mailbox->take(text, finish);
      pass_on(parser.push(text));
    }
    pass_on(parser.flush());
    if (finish.reason == FinishReason::kError) throw Error(finish.error_kind, finish.error);
    return {.reason = std::string(name_of(finish.reason)),
            .prompt_tokens = finish.prompt_tokens,
            .output_tokens = finish.output_tokens,
            .cached_tokens = finish.cached_tokens,
            .seconds_to_first = finish.seconds_to_first,
            .seconds = finish.seconds};
  }

 private:
  static std::string checked_template(const LoadedModel& model) {
    if (model.chat_template().empty()) fail("{}: the model has no chat template", model.path());
    return model.chat_template();
  }

  struct Prompt {
    std::vector<TokenId> ids;
    bool thinking = false;  // it ends where the model thinks
  };

  Prompt prompt_of(const std::vector<ChatMessage>& messages) const {
    OrderedJson list = OrderedJson::array();
    for (const ChatMessage& message : messages)
      list.push_back({{"role", message.role}, {"content", message.content}});
    TemplateVariables variables = model_.template_tokens();
    variables["messages"] = template_messages(list, model_.chat_template());
    variables["tools"] = variables["documents"] = nullptr;  // templates ask whether they are none
    variables["add_generation_prompt"] = true;
    PromptGuard guard(model_.tokenizer());
    const std::string rendered = template_.render(guard.protect(variables));
    return {.ids = guard.encode(rendered), .thinking = prompt_opens_thinking(syntax_, guard.plain(rendered))};
  }

  SamplingOptions sampling_of(const ChatOptions& options) const {
    SamplingOptions sampling = sampling_;
    sampling.temperature = options.temperature.value_or(sampling.temperature);
    sampling.top_p = options.top_p.value_or(sampling.top_p);
    sampling.top_k = options.top_k.value_or(sampling.top_k);
    sampling.seed = options.seed ? *options.seed : std::random_device{}();  // else /retry would say the same
    return sampling;
  }

  LoadedModel model_;
  int context_;
  ChatTemplate template_;
  ChatSyntax syntax_;
  std::unique_ptr<Runner> runner_;
  Engine engine_;
  SamplingOptions sampling_;
  std::atomic<bool> stopped_ = false;
};

}  // namespace

std::unique_ptr<ChatBackend> model_backend(const std::string& path, ModelOptions options, int context) {
  return std::make_unique<ModelBackend>(path, std::move(options), context);
}

}  // namespace kt::inline cli
