#include "model/generator.h"

#include <algorithm>
#include <chrono>

#include "core/check.h"
#include "schedule/collectives/collectives.h"

namespace treeline::model {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void RequireFits(const LlamaRank& rank, std::size_t index, const Request& request) {
  Require(!request.prompt.empty(), "prompt ", index, " has no tokens");
  Require(request.most_tokens >= 0, "prompt ", index, " asks for ", request.most_tokens, " tokens");
  const auto prompt = static_cast<std::int64_t>(request.prompt.size());
  Require(prompt + request.most_tokens <= rank.context(), "the prompt has ", prompt,
          " tokens, and up to ", request.most_tokens, " are to follow; the context holds ",
          rank.context());
}

}  // namespace

std::int64_t Generator::Prefill(Active& active, const Request& request, std::int64_t kept,
                                const GenerationEvents& events) {
  const Clock::time_point start = Clock::now();
  const auto total = static_cast<std::int64_t>(request.prompt.size());
  active.logits.resize(static_cast<std::size_t>(rank_.model().shape().vocabulary));
  // Rank 0 knows whether it goes on.
  const auto tell = [&](std::int64_t tokens) {
    std::uint8_t go_on = 1;
    if (comm_.rank() == 0 && events.prefilled) {
      go_on = events.prefilled(active.request, tokens, total) ? 1 : 0;
    }
    Broadcast(comm_, 0, std::as_writable_bytes(std::span(&go_on, 1)));
    active.stopped = go_on == 0;
    return !active.stopped;
  };
  std::int64_t done = 1;
  if (kept + 1 == total) {  // like any that follows
    const LlamaRank::Next next{active.id, request.prompt.back()};
    rank_.Decode(std::span(&next, 1), active.logits);
    tell(total);
  } else {
    done =
        rank_.Prefill(active.id, std::span(request.prompt).subspan(static_cast<std::size_t>(kept)),
                      active.logits, [&](std::int64_t tokens) { return tell(kept + tokens); });
  }
  for (const Token token : request.prompt) active.sampler.Accept(token);
  cost_.prompt_tokens += done;
  cost_.prompt_seconds += SecondsSince(start);
  return kept + done;
}

Generator::Active Generator::Begin(std::size_t index, const Request& request,
                                   const GenerationEvents& events) {
  Active active{.request = index,
                .id = rank_.cache().Add(),
                .sampler = Sampler(request.sampling, rank_.model().shape().vocabulary),
                .made = 0,
                .stopped = false,
                .logits = {}};
  Prefill(active, request, 0, events);
  return active;
}

template <class Body>
void Generator::CountDecoding(const Body& decode) {
  const CommCounters before = comm_.counters();
  const Clock::time_point start = Clock::now();
  decode();
  cost_.seconds += SecondsSince(start);
  cost_.bytes += comm_.counters().bytes - before.bytes;
  cost_.rounds += comm_.counters().rounds - before.rounds;
}

std::vector<Token> Generator::Choose(std::vector<Active>& active, std::span<const Request> requests,
                                     const GenerationEvents& events) {
  std::vector<Token> tokens(active.size(), kStop);
  CountDecoding([&] {
    for (std::size_t i = 0; comm_.rank() == 0 && i < active.size(); ++i) {
      Active& each = active[i];
      if (each.stopped || each.made >= requests[each.request].most_tokens) continue;
      const Token token = each.sampler.Sample(each.logits);
      if (events.is_end && events.is_end(token)) continue;
      if (events.generated && !events.generated(each.request, token, each.logits)) continue;
      tokens[i] = token;
    }
    Broadcast(comm_, 0, std::as_writable_bytes(std::span(tokens)));
  });
  for (Active& each : active) ++each.made;
  return tokens;
}

void Generator::Compute(std::vector<Active>& active, std::span<const Token> tokens) {
  const auto vocabulary = static_cast<std::size_t>(rank_.model().shape().vocabulary);
  logits_.resize(active.size() * vocabulary);
  std::vector<LlamaRank::Next> next;
  for (std::size_t i = 0; i < active.size(); ++i) next.push_back({active[i].id, tokens[i]});
  CountDecoding([&] { rank_.Decode(next, logits_); });
  cost_.tokens += static_cast<std::int64_t>(active.size());
  for (std::size_t i = 0; i < active.size(); ++i) {
    std::copy_n(logits_.begin() + static_cast<std::ptrdiff_t>(i * vocabulary), vocabulary,
                active[i].logits.begin());
  }
}

void Generator::Run(std::span<const Request> requests, int at_a_time,
                    const GenerationEvents& events) {
  Require(at_a_time >= 1, "at a time are ", at_a_time, " requests; at least 1 is needed");
  for (std::size_t i = 0; i < requests.size(); ++i) RequireFits(rank_, i, requests[i]);
  std::vector<Active> active;
  std::int64_t reserved = 0;  // tokens that the active ones may come to have
  std::size_t next = 0;
  const auto tokens_of = [&](std::size_t request) {
    return static_cast<std::int64_t>(requests[request].prompt.size()) +
           requests[request].most_tokens;
  };
  while (next < requests.size() || !active.empty()) {
    while (next < requests.size() && active.size() < static_cast<std::size_t>(at_a_time) &&
           (active.empty() || reserved + tokens_of(next) <= rank_.context())) {
      active.push_back(Begin(next, requests[next], events));
      reserved += tokens_of(next++);
    }
    std::vector<Token> tokens = Choose(active, requests, events);
    for (std::size_t i = active.size(); i-- > 0;) {
      if (tokens[i] != kStop) continue;
      if (comm_.rank() == 0 && events.ended) events.ended(active[i].request);
      rank_.cache().Free(active[i].id);
      reserved -= tokens_of(active[i].request);
      active.erase(active.begin() + static_cast<std::ptrdiff_t>(i));
      tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (!active.empty()) Compute(active, tokens);
  }
}

std::int64_t Generator::Continue(SequenceId id, std::vector<Token>& tokens, const Request& request,
                                 const GenerationEvents& events) {
  RequireFits(rank_, 0, request);
  // At least one token is computed: its logits are needed.
  const auto same = std::ranges::mismatch(tokens, request.prompt).in1 - tokens.begin();
  const std::int64_t kept =
      std::min<std::int64_t>(same, static_cast<std::int64_t>(request.prompt.size()) - 1);
  rank_.cache().Truncate(id, kept);
  std::vector<Active> active;
  active.push_back({.request = 0,
                    .id = id,
                    .sampler = Sampler(request.sampling, rank_.model().shape().vocabulary),
                    .made = 0,
                    .stopped = false,
                    .logits = {}});
  const std::int64_t computed = Prefill(active[0], request, kept, events);
  tokens.assign(request.prompt.begin(), request.prompt.begin() + computed);
  for (;;) {
    const std::vector<Token> chosen = Choose(active, std::span(&request, 1), events);
    if (chosen[0] == kStop) break;
    tokens.push_back(chosen[0]);
    Compute(active, chosen);
  }
  if (comm_.rank() == 0 && events.ended) events.ended(0);
  return kept;
}

}  // namespace treeline::model
