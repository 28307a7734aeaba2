// What may come next, decided token by token: the hook by which a grammar steers one sequence.
#pragma once
#include <span>

#include "text/tokenizer/bpe.h"

namespace kt::inline texts {

// The state of one sequence; one thread at a time.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // Sets the logits of tokens that cannot come next to -inf. At least one token always can. Ids past the
  // tokenizer's (a padded vocabulary) cannot.
  virtual void mask(std::span<float> logits) = 0;
  // The token that was chosen, end tokens too.
  virtual void accept(TokenId id) = 0;
};

}  // namespace kt::inline texts
