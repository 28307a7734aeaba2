// The body of POST /v1/responses as the chat request that it means.
#pragma once
#include "text/json.h"

namespace kt::inline server {

// Instructions, items of `input`, tools and the format of the text in the words of chat requests. ApiError(400) names
// the field for what is no such request, and for what would need answers that were kept: `store`,
// `previous_response_id`, `conversation`, `background`.
OrderedJson chat_of_responses(const OrderedJson& body);

}  // namespace kt::inline server
