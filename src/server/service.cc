#include "server/service.h"

#include <malloc.h>

#include <algorithm>
#include <ctime>
#include <filesystem>

#include "base/log.h"
#include "base/mapped_faults.h"
#include "cuda/device.h"
#include "server/answer.h"
#include "server/api_error.h"
#include "server/fields.h"

namespace kt::inline server {
namespace {

constexpr size_t kSchemasKept = 16;
constexpr size_t kSchemaBytes = 256 << 10;  // of one that is remembered

// do_sample, temperature, top_p ... of generation_config.json; a GGUF file has none.
SamplingOptions sampling_of(const std::string& path) {
  SamplingOptions out;
  const std::string file = path + "/generation_config.json";
  if (!std::filesystem::exists(file)) return out;
  const Json config = read_json(file);
  if (!config.is_object()) return out;
  const auto number = [&](const char* name, double otherwise) {
    const auto found = config.find(name);
    return found != config.end() && found->is_number() ? found->get<double>() : otherwise;
  };
  if (config.value("do_sample", Json()) == Json(false)) out.temperature = 0;
  SamplingOptions read = out;
  read.temperature = number("temperature", out.temperature);
  read.top_p = number("top_p", out.top_p);
  read.top_k = static_cast<int>(std::clamp(number("top_k", out.top_k), -1.0, 1e6));
  read.min_p = number("min_p", out.min_p);
  read.repetition_penalty = number("repetition_penalty", out.repetition_penalty);
  check_sampling(read);
  return read;
}

}  // namespace

Service::Service(LoadedModel& model, ServiceOptions options, std::function<void(std::function<void()>)> post)
    : model_(model),
      options_(std::move(options)),
      post_(std::move(post)),
      default_sampling_(sampling_of(model.path())),
      runner_(model.make_runner(options_.pages,
                                {.sequences = options_.max_running, .snapshots = options_.state_snapshots})),
      started_(static_cast<int64_t>(std::time(nullptr))),
      start_(std::chrono::steady_clock::now()) {
  if (!options_.chat_template.empty()) template_.emplace(options_.chat_template, options_.name);
  for (size_t id = 0; id < tokenizer().size(); ++id)
    longest_token_ = std::max(longest_token_, tokenizer().token_bytes(static_cast<TokenId>(id)).size());
  monitor_ = std::make_unique<Monitor>(*runner_, options_.rates, [this] { look_after(); });
  engine_ = std::make_unique<Engine>(*runner_, &model.tokenizer(),
                                     SchedulerOptions{.step_tokens = runner_->max_tokens(),
                                                      .sequences = options_.max_running,
                                                      .shared_tokens = model.shared_tokens(),
                                                      .max_pause = options_.max_pause},
                                     [this] { deliver(); });
}

Service::~Service() {
  monitor_.reset();  // its thread cancels through the engine
  engine_.reset();
}

double Service::uptime() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

int Service::longest() const { return std::min(runner_->context(), runner_->cache_pages() * kPageTokens); }

void Service::check_length(std::string_view text, const char* name) const {
  const size_t most = static_cast<size_t>(longest()) * longest_token_;
  if (text.size() <= most) return;
  throw ApiError(400,
                 kt::text("{}: {} bytes are more than {} tokens can hold; the context has no more", name,
                          text.size(), longest()),
                 name);
}

std::shared_ptr<TokenConstraint> Service::constraint(const Grammar& grammar) {
  const TokenTrie* trie = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!trie_) trie_ = std::make_unique<TokenTrie>(tokenizer());
    trie = trie_.get();
  }
  return constrain(*trie, grammar, model_.end_ids());
}

Grammar Service::schema_grammar(const OrderedJson& schema) {
  std::string key = json_text(schema);
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(schemas_, key, &std::pair<std::string, Grammar>::first);
    if (found != schemas_.end()) {
      schemas_.splice(schemas_.begin(), schemas_, found);
      return found->second;
    }
  }
  Grammar grammar = json_schema_grammar(schema);
  if (key.size() > kSchemaBytes) return grammar;
  const std::lock_guard lock(mutex_);
  schemas_.emplace_front(std::move(key), grammar);
  if (schemas_.size() > kSchemasKept) schemas_.pop_back();
  return grammar;
}

std::optional<std::string> Service::model_fault() {
  if (const auto lost = lost_gpu()) {
    log_once(LogLevel::kError, "{}; the server stops", *lost);
    return lost;
  }
  const auto broken = broken_mapping();
  if (!broken) return std::nullopt;
  log_once(LogLevel::kError, "{}; requests are refused until the server is started again", *broken);
  return "a file of the model has changed: " + *broken;
}

void Service::check_model() {
  if (const auto fault = model_fault()) throw ApiError(503, *fault);
}

std::string Service::model_name(int adapter) const {
  return adapter < 0 ? options_.name : options_.name + ":" + model_.adapters()[static_cast<size_t>(adapter)];
}

int Service::adapter_named(std::string_view model) const {
  const std::vector<std::string>& names = model_.adapters();
  for (size_t i = 0; i < names.size(); ++i)
    if (const int number = static_cast<int>(i); model == names[i] || model == model_name(number))
      return number;
  const std::string begin = options_.name + ":";
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  if (!names.empty() && model.starts_with(begin))
    throw ApiError(
        404, text("no adapter named {}; this server has {}", shown_value(model.substr(begin.size())), all),
        "model");
  return -1;
}

void Service::run(const std::shared_ptr<Answer>& answer, std::vector<GenerateRequest> requests) {
  if (draining_) throw ApiError(503, "the server is stopping; no new requests");
  check_model();
  const size_t live = engine_->live(),
               most = static_cast<size_t>(options_.max_running + options_.max_waiting);
  if (live + requests.size() > most)
    throw ApiError(429, text("{} more answers besides {}: at most {} run and {} wait; try again later",
                             requests.size(), live, options_.max_running, options_.max_waiting));
  try {
    for (const GenerateRequest& request : requests) engine_->check(request);
  } catch (const Error& error) {
    throw ApiError(400, error.what());
  }
  {
    const std::lock_guard lock(mutex_);
    answers_.emplace(answer.get(), answer);
  }
  {
    const std::lock_guard lock(answer->mutex_);
    for (size_t i = 0; i < requests.size(); ++i) {
      // The engine's thread only copies; JSON is made where sockets are written.
      requests[i].on_event = [this, answer, i](const GenerateEvent& event) {
        AnswerEvent copy{.text = std::string(event.text)};
        if (event.token) copy.token = *event.token;
        if (event.finish) copy.finish = *event.finish;
        copy.prompt.assign(event.prompt.begin(), event.prompt.end());
        brought_.push_back({answer, i, std::move(copy)});
      };
      answer->ids_.push_back(engine_->submit(std::move(requests[i])));
    }
  }
  answer->responder().on_gone([this, weak = std::weak_ptr(answer)] {
    if (const auto gone = weak.lock()) cancel(*gone);
  });
}

// One call for all that a step brought: the engine's thread pays for a token what a push_back costs.
void Service::deliver() {
  if (brought_.empty()) return;
  const auto all = std::make_shared<std::vector<Brought>>(std::move(brought_));
  brought_.clear();
  brought_.reserve(all->size());
  post_([all] {
    for (Brought& one : *all) {
      try {
        one.answer->take(one.sequence, one.event);
      } catch (const std::exception& error) {  // ends this answer; the others have their events to come
        KT_LOG(LogLevel::kError, "an answer failed: {}", error.what());
        one.answer->refuse(500, error.what());
      }
    }
    all->clear();
  });
}

void Service::cancel(Answer& answer) {
  const std::lock_guard lock(answer.mutex_);
  if (answer.cancelled_) return;
  answer.cancelled_ = true;
  for (RequestId id : answer.ids_) engine_->cancel(id);
}

bool Service::idle() const {
  const std::lock_guard lock(mutex_);
  return answers_.empty();
}

void Service::forget(const Answer* answer) {
  const std::lock_guard lock(mutex_);
  answers_.erase(answer);
}

// Outside of the lock afterwards: the last owner of an answer calls forget().
std::vector<std::shared_ptr<Answer>> Service::answers() const {
  std::vector<std::shared_ptr<Answer>> out;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, weak] : answers_)
    if (auto answer = weak.lock()) out.push_back(std::move(answer));
  return out;
}

void Service::cancel_all() {
  for (const auto& answer : answers()) cancel(*answer);
}

void Service::look_after() {
  end_overdue();
#ifdef __GLIBC__
  if (int left = trims_; left > 0) {
    ::malloc_trim(0);  // each thread's heap would keep what a large body took
    trims_.compare_exchange_strong(left, left - 1);
  }
#endif
}

void Service::end_overdue() {
  const double most = options_.request_timeout_s;
  if (most <= 0) return;
  const auto now = std::chrono::steady_clock::now();
  for (const auto& answer : answers())
    if (std::chrono::duration<double>(now - answer->started()).count() > most)
      answer->abort(
          408,
          text("the answer took longer than {} s, the most this server gives one (request_timeout)", most));
}

}  // namespace kt::inline server
