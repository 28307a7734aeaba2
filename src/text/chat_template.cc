#include "text/chat_template.h"

#include "text/jinja/interpret.h"
#include "text/jinja/parser.h"

namespace kt::inline texts {

namespace {

constexpr size_t kMaxSource = 4u << 20;  // published templates have a few KB

}  // namespace

struct ChatTemplate::Parsed {
  jinja::Body body;
};

ChatTemplate::ChatTemplate(const std::string& source, std::string name)
    : name_(std::move(name)), clock_([] { return std::time(nullptr); }) {
  jinja::Meter meter(name_, TemplateBudget{});
  if (source.size() > kMaxSource) {
    meter.fail("{} of source is larger than {}", human_bytes(source.size()), human_bytes(kMaxSource));
  }
  parsed_ = std::make_unique<const Parsed>(Parsed{jinja::parse(source, meter)});
}

ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

std::string ChatTemplate::render(const TemplateVariables& variables, TemplateBudget budget) const {
  jinja::Meter meter(name_, budget);
  if (!variables.is_object()) meter.fail("variables must be an object, not {}", variables.type_name());
  const jinja::Value values = jinja::from_json(variables, meter);
  return jinja::Interpreter(values, meter, clock_).run(parsed_->body);
}

}  // namespace kt::inline texts
