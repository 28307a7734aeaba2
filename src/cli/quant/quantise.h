// CPU weights of a model for verbs that want them made on the way: what `kt quant` writes, where it writes it.
#pragma once
#include <string>

namespace kt::inline cli {

// The folder that `kt quant` writes to where none is named: "./Qwen3-30B-A3B-int4". `model` is a path; one in a cache
// of a hub is called by its repository.
std::string default_output(const std::string& model, const std::string& suffix);

bool is_converted(const std::string& path);  // a folder with weights that kt quant has written to their end

// Whether that conversion's manifest names what is in this model's files: fine-tunes of one base differ in nothing
// else.
bool was_made_of(const std::string& output, const std::string& model);

struct QuantiseRequest {
  std::string model, output, method;  // method: "int4" or "int8"
  int threads = 0;
  bool quiet = false;  // says nothing on standard output
};
// Reports like the verb, and goes on where an interrupted one stopped.
void quantise(const QuantiseRequest& request);

}  // namespace kt::inline cli
