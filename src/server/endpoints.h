// The handlers of the API, one for each path. They parse, submit and return; answers come later through the
// Responder. ApiError becomes the reply.
#pragma once
#include "http/server.h"

namespace kt::inline server {

class Service;

void post_chat_completions(Service& service, HttpRequest& request, const Responder& responder);
void post_completions(Service& service, HttpRequest& request, const Responder& responder);
void post_responses(Service& service, HttpRequest& request, const Responder& responder);
void post_count_tokens(Service& service, HttpRequest& request, const Responder& responder);
void post_messages(Service& service, HttpRequest& request, const Responder& responder);
void post_embeddings(Service& service, HttpRequest& request, const Responder& responder);
void post_tokenize(Service& service, HttpRequest& request, const Responder& responder);
void post_detokenize(Service& service, HttpRequest& request, const Responder& responder);
void get_models(Service& service, HttpRequest& request, const Responder& responder);
void get_status(Service& service, HttpRequest& request, const Responder& responder);
void get_metrics(Service& service, HttpRequest& request, const Responder& responder);

}  // namespace kt::inline server
