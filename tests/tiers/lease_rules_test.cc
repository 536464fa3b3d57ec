// SPDX-License-Identifier: Apache-2.0
// tests/tiers/lease_rules_test.cc: the four rules of the pinned pool, the order of need, taking
// back, and what a reserve is worth. They hold whatever nodes the memory lies on: each test runs on
// one NUMA node, and on two with requests that want the one or the other.
#include <gmock/gmock.h>

#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "tests/support/recording_policy.h"
#include "tiers/pool/pinned_pool.h"

namespace ziggurat {
namespace lease_rules_test {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::uint64_t kPage = 4 * kKiB;

/// A pool of pages, coroutines that hold some, and what happened in which order.
class LeaseRules : public ::testing::TestWithParam<int> {
 protected:
  static bool two_nodes() { return GetParam() == 2; }
  /// `options` on the machine of this test.
  PinnedPoolOptions placed(PinnedPoolOptions options) {
    if (!two_nodes()) return options;
    options.nodes = {{.numa_node = 0}, {.numa_node = 1}};
    options.use_huge_pages = false;
    options.memory_policy = &policy_;
    return options;
  }
  std::unique_ptr<PinnedPool> make(std::uint64_t pages,
                                   std::vector<PinnedPoolOptions::Reserve> reserves = {},
                                   CancelScope* cancel = nullptr) {
    PinnedPoolOptions options;
    options.cancel = cancel;
    options.budget_bytes = pages * kPage;
    options.reserves = std::move(reserves);
    return PinnedPool::create(reactor_, placed(std::move(options)));
  }
  static LeaseRequest want(Purpose purpose, std::uint64_t pages, std::uint64_t position,
                           const char* holder = "test") {
    return {.purpose = purpose,
            .size_bytes = pages * kPage,
            .need = {0, position},
            .holder = holder,
            .numa_node = two_nodes() ? static_cast<int>(position % 2) : -1};
  }
  /// Starts a coroutine that acquires and keeps what it gets in leases_[name], noting the name in
  /// served_.
  void start(PinnedPool& pool, const std::string& name, const LeaseRequest& request) {
    reactor_.spawn(hold(pool, name, request),
                   [this, name](std::exception_ptr error) { errors_[name] = error; });
    reactor_.run_until_idle();
  }
  Task<> hold(PinnedPool& pool, std::string name, LeaseRequest request) {
    Lease lease = co_await pool.acquire(request);
    served_.push_back(name);
    leases_[name] = std::move(lease);
  }
  void drop(const std::string& name) {
    leases_.erase(name);
    reactor_.run_until_idle();
  }
  ErrorCode code_of(const std::string& name) {
    try {
      std::rethrow_exception(errors_.at(name));
    } catch (const Error& error) {
      message_ = error.what();
      return error.code();
    }
  }

  test::RecordingPolicy policy_;
  Reactor reactor_{Clock::Kind::kVirtual};
  std::vector<std::string> served_;
  std::map<std::string, Lease> leases_;
  std::map<std::string, std::exception_ptr> errors_;
  std::string message_;
};

TEST_P(LeaseRules, a_lease_has_the_exact_size_and_the_alignment_and_comes_back) {
  const auto pool = make(16);
  {
    const Lease lease = pool->try_acquire({.purpose = Purpose::kParams, .size_bytes = 5000});
    ASSERT_TRUE(lease);
    EXPECT_EQ(lease.bytes().size(), 5000u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(lease.bytes().data()) % kPage, 0u);
    EXPECT_EQ(pool->free_bytes(), 14 * kPage);
  }
  EXPECT_EQ(pool->free_bytes(), 16 * kPage);
}

TEST_P(LeaseRules, moving_a_lease_moves_the_duty_to_return_it) {
  const auto pool = make(4);
  Lease first = pool->try_acquire(want(Purpose::kParams, 1, 0));
  Lease second = pool->try_acquire(want(Purpose::kParams, 2, 0));
  first = std::move(second);
  EXPECT_EQ(pool->free_bytes(), 2 * kPage);
  EXPECT_FALSE(second);
  Lease third(std::move(first));
  third.reset();
  EXPECT_EQ(pool->free_bytes(), 4 * kPage);
}

// Rule 1: all of a work item's memory is one request, granted whole or not at all.
TEST_P(LeaseRules, rule_1_a_request_waits_whole_and_holds_nothing_meanwhile) {
  const auto pool = make(8);
  start(*pool, "a", want(Purpose::kOptimizer, 5, 0));
  start(*pool, "b", want(Purpose::kOptimizer, 6, 1));
  EXPECT_THAT(served_, ElementsAre("a"));
  EXPECT_EQ(pool->free_bytes(), 3 * kPage);
  EXPECT_EQ(pool->waiting(), 1u);
  drop("a");
  EXPECT_THAT(served_, ElementsAre("a", "b"));
  leases_.clear();
}

// Rule 2.
TEST_P(LeaseRules, rule_2_waiters_are_served_in_order_of_need_not_of_arrival) {
  const auto pool = make(4);
  start(*pool, "holder", want(Purpose::kOptimizer, 4, 0));
  start(*pool, "late", want(Purpose::kOptimizer, 4, 9));
  start(*pool, "soon", want(Purpose::kOptimizer, 4, 1));
  start(*pool, "next", want(Purpose::kOptimizer, 4, 5));
  start(*pool, "next too", want(Purpose::kOptimizer, 4, 5));
  for (const char* name : {"holder", "soon", "next", "next too", "late"}) drop(name);
  EXPECT_THAT(served_, ElementsAre("holder", "soon", "next", "next too", "late"));
}

TEST_P(LeaseRules, rule_2_a_generation_comes_before_a_position) {
  const auto pool = make(4);
  start(*pool, "holder", want(Purpose::kOptimizer, 4, 0));
  LeaseRequest next_step = want(Purpose::kOptimizer, 4, 0);
  next_step.need.generation = 1;
  start(*pool, "next step", next_step);
  start(*pool, "this step", want(Purpose::kOptimizer, 4, 99));
  drop("holder");
  EXPECT_THAT(served_, ElementsAre("holder", "this step"));
  leases_.clear();
  reactor_.run_until_idle();
  leases_.clear();
}

TEST_P(LeaseRules, rule_2_a_small_late_request_does_not_overtake_a_large_soon_one) {
  const auto pool = make(8);
  start(*pool, "holder", want(Purpose::kOptimizer, 5, 0));
  start(*pool, "large", want(Purpose::kOptimizer, 6, 1));
  start(*pool, "small", want(Purpose::kOptimizer, 1, 2));
  start(*pool, "small of another class", want(Purpose::kParams, 1, 3));
  EXPECT_THAT(served_, ElementsAre("holder"));
  EXPECT_FALSE(pool->try_acquire(want(Purpose::kStaging, 1, 4)));
  EXPECT_TRUE(pool->try_acquire(want(Purpose::kStaging, 1, 0))) << "it is sooner than who waits";
  drop("holder");
  EXPECT_THAT(served_, ElementsAre("holder", "large", "small", "small of another class"));
  leases_.clear();
}

TEST_P(LeaseRules, rule_2_demand_takes_back_clean_prefetch_of_the_latest_need_first) {
  const auto pool = make(6);
  std::vector<std::string> taken;
  for (const auto& [name, position] :
       std::map<std::string, std::uint64_t>{{"p3", 3}, {"p7", 7}, {"p9", 9}}) {
    start(*pool, name, want(Purpose::kParams, 2, position));
    pool->offer(leases_[name], {0, position}, [this, &taken, n = name] {
      taken.push_back(n);
      leases_.erase(n);
    });
  }
  start(*pool, "demand", want(Purpose::kParams, 2, 5));
  EXPECT_THAT(taken, ElementsAre("p9"));
  EXPECT_THAT(served_, ElementsAre("p3", "p7", "p9", "demand"));
  start(*pool, "late demand", want(Purpose::kParams, 2, 8));
  EXPECT_THAT(taken, ElementsAre("p9")) << "p3 and p7 are needed sooner than it";
  drop("demand");
  EXPECT_THAT(served_, ElementsAre("p3", "p7", "p9", "demand", "late demand"));
  leases_.clear();
}

TEST_P(LeaseRules, rule_2_prefetch_is_not_thrown_away_where_it_would_not_be_enough) {
  const auto pool = make(6);
  bool taken = false;
  start(*pool, "prefetch", want(Purpose::kParams, 2, 7));
  pool->offer(leases_["prefetch"], {0, 7}, [&] {
    taken = true;
    leases_.erase("prefetch");
  });
  start(*pool, "busy", want(Purpose::kParams, 3, 0));
  start(*pool, "demand", want(Purpose::kParams, 5, 1));
  EXPECT_FALSE(taken) << "with it, only 3 of the 5 pages would be free";
  drop("busy");
  EXPECT_TRUE(taken);
  EXPECT_THAT(served_, ElementsAre("prefetch", "busy", "demand"));
  leases_.clear();
}

TEST_P(LeaseRules, rule_2_a_withdrawn_offer_is_not_taken_and_one_made_late_is) {
  const auto pool = make(4);
  int taken = 0;
  start(*pool, "prefetch", want(Purpose::kParams, 4, 7));
  const std::function<void()> give_back = [&] {
    ++taken;
    leases_.erase("prefetch");
  };
  const auto id = pool->offer(leases_["prefetch"], {0, 7}, give_back);
  pool->withdraw(id);
  start(*pool, "demand", want(Purpose::kParams, 4, 1));
  EXPECT_EQ(taken, 0);
  pool->offer(leases_["prefetch"], {0, 7}, give_back);
  reactor_.run_until_idle();
  EXPECT_EQ(taken, 1);
  EXPECT_THAT(served_, ElementsAre("prefetch", "demand"));
  leases_.clear();
}

TEST_P(LeaseRules, rule_2_an_offer_ends_with_its_lease) {
  const auto pool = make(4);
  start(*pool, "prefetch", want(Purpose::kParams, 4, 7));
  pool->offer(leases_["prefetch"], {0, 7}, [] { ADD_FAILURE() << "the lease is long gone"; });
  drop("prefetch");
  start(*pool, "other", want(Purpose::kParams, 4, 8));
  start(*pool, "demand", want(Purpose::kParams, 4, 1));
  EXPECT_THAT(served_, ElementsAre("prefetch", "other"));
  drop("other");
  leases_.clear();
}

// Rule 3.
TEST_P(LeaseRules, rule_3_a_budget_below_the_reserves_is_refused_and_the_smallest_named) {
  const std::vector<PinnedPoolOptions::Reserve> reserves = {{Purpose::kOptimizer, 12 * kPage},
                                                            {Purpose::kParams, 4 * kPage}};
  try {
    make(15, reserves);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_THAT(error.what(), HasSubstr("64.0 KiB (65536 bytes)"));
    EXPECT_THAT(error.what(), HasSubstr("optimizer 48.0 KiB + params 16.0 KiB"));
  }
  const auto pool = make(16, reserves);
  EXPECT_TRUE(pool->try_acquire(want(Purpose::kOptimizer, 12, 0)));
}

TEST_P(LeaseRules, rule_3_the_smallest_budget_counts_staggering) {
  PinnedPoolOptions options;
  options.reserves = {{Purpose::kOptimizer, 2 * kMiB}};
  options.budget_bytes = PinnedPool::smallest_budget(options);
  EXPECT_EQ(options.budget_bytes, 2 * kMiB + kPage);
  const auto pool = PinnedPool::create(reactor_, placed(options));
  EXPECT_TRUE(pool->try_acquire({.purpose = Purpose::kOptimizer, .size_bytes = 2 * kMiB}));
}

TEST_P(LeaseRules, rule_3_a_class_uses_its_own_reserve_first_and_no_other_class_may) {
  const auto pool = make(8, {{Purpose::kParams, 4 * kPage}});
  const Lease reserve = pool->try_acquire(want(Purpose::kParams, 4, 0));
  ASSERT_TRUE(reserve);
  {
    const Lease general = pool->try_acquire(want(Purpose::kOptimizer, 4, 0));
    EXPECT_TRUE(general) << "the params left general memory to those who have nothing else";
  }
  const Lease general = pool->try_acquire(want(Purpose::kParams, 4, 0));
  EXPECT_TRUE(general) << "a second item of the class is lent general memory";
  EXPECT_FALSE(pool->try_acquire(want(Purpose::kParams, 1, 0)));
}

TEST_P(LeaseRules, rule_3_what_is_kept_for_good_takes_no_reserve) {
  const auto pool = make(6, {{Purpose::kOptimizer, 2 * kPage}});
  LeaseRequest record = want(Purpose::kOptimizer, 2, 0);
  record.for_good = true;
  const Lease first = pool->try_acquire(record);
  const Lease second = pool->try_acquire(record);
  EXPECT_TRUE(first && second);
  EXPECT_FALSE(pool->try_acquire(record)) << "only the reserve is left";
  EXPECT_TRUE(pool->try_acquire(want(Purpose::kOptimizer, 2, 1))) << "for an item of that class";
}

TEST_P(LeaseRules, rule_3_a_reserve_stands_empty_rather_than_serve_another_class) {
  const auto pool = make(8, {{Purpose::kParams, 4 * kPage}});
  const Lease general = pool->try_acquire(want(Purpose::kOptimizer, 4, 0));
  ASSERT_TRUE(general);
  EXPECT_FALSE(pool->try_acquire(want(Purpose::kOptimizer, 1, 0)));
  EXPECT_TRUE(pool->try_acquire(want(Purpose::kParams, 4, 0)));
}

TEST_P(LeaseRules,
       rule_3_who_waits_for_general_memory_does_not_keep_another_class_from_its_reserve) {
  const auto pool = make(8, {{Purpose::kParams, 4 * kPage}});
  start(*pool, "holder", want(Purpose::kOptimizer, 4, 0));
  start(*pool, "soon", want(Purpose::kOptimizer, 4, 1));
  start(*pool, "params", want(Purpose::kParams, 4, 99));
  EXPECT_THAT(served_, ElementsAre("holder", "params"));
  start(*pool, "more params", want(Purpose::kParams, 1, 100));
  drop("params");
  EXPECT_THAT(served_, ElementsAre("holder", "params", "more params"));
  drop("holder");
  EXPECT_THAT(served_, ElementsAre("holder", "params", "more params", "soon"));
  leases_.clear();
}

// The property behind rule 3, under fragmentation: whatever is out, a class of which nothing is out
// gets its largest item.
TEST_P(LeaseRules, rule_3_a_reserve_holds_its_largest_item_whatever_the_others_do) {
  const std::vector<Purpose> classes = {Purpose::kOptimizer, Purpose::kParams, Purpose::kGradients};
  const std::vector<std::uint64_t> largest = {700 * kKiB, 300 * kKiB, 9 * kPage};
  for (unsigned seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    PinnedPoolOptions options;
    for (std::size_t c = 0; c < 3; ++c) options.reserves.push_back({classes[c], largest[c]});
    options.budget_bytes = PinnedPool::smallest_budget(options) + random() % (2 * kMiB);
    const auto pool = PinnedPool::create(reactor_, placed(options));
    std::vector<std::pair<std::size_t, Lease>> out;
    for (int step = 0; step < 300; ++step) {
      const std::size_t c = random() % 3;
      Lease lease =
          pool->try_acquire({.purpose = classes[c], .size_bytes = 1 + random() % largest[c]});
      if (lease) out.emplace_back(c, std::move(lease));
      if (!lease || random() % 3 == 0) {
        if (!out.empty())
          out.erase(out.begin() + static_cast<std::ptrdiff_t>(random() % out.size()));
      }
      for (std::size_t k = 0; k < 3; ++k) {
        const bool none_out =
            std::none_of(out.begin(), out.end(), [k](const auto& o) { return o.first == k; });
        if (none_out) {
          ASSERT_TRUE(pool->try_acquire({.purpose = classes[k], .size_bytes = largest[k]}));
        }
      }
    }
  }
}

// Rule 4: the planted circle. Two items break rule 1: each holds one piece and waits for the
// other's.
TEST_P(LeaseRules, rule_4_a_circle_is_reported_with_who_holds_what_and_not_hung) {
  const auto pool = make(8);
  Signal both_hold(reactor_);
  int holding = 0;
  const auto greedy = [&](PinnedPool& p, LeaseRequest request) -> Task<> {
    const Lease first = co_await p.acquire(request);
    if (++holding == 2) both_hold.set();
    co_await both_hold.wait();
    request.holder = "second piece";
    const Lease second = co_await p.acquire(request);
  };
  reactor_.spawn(greedy(*pool, want(Purpose::kGradients, 4, 1, "left")),
                 [this](std::exception_ptr error) { errors_["left"] = error; });
  try {
    reactor_.block_on(greedy(*pool, want(Purpose::kOptimizer, 4, 2, "right")));
    FAIL() << "no lock-up was found";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_THAT(error.what(), HasSubstr("2 requests wait"));
    EXPECT_THAT(error.what(), ContainsRegex("holds +16.0 KiB gradients .*position 1: left"));
    EXPECT_THAT(error.what(), ContainsRegex("holds +16.0 KiB optimizer .*position 2: right"));
    EXPECT_THAT(error.what(), ContainsRegex("waits +16.0 KiB optimizer .*second piece"));
  }
  reactor_.run_until_idle();
  EXPECT_EQ(code_of("left"), ErrorCode::kResourceExhausted);
  EXPECT_EQ(pool->free_bytes(), 8 * kPage) << "both gave back what they held";
}

TEST_P(LeaseRules, rule_4_holds_with_an_engine_thread_too) {
  Reactor reactor;
  reactor.start();
  PinnedPoolOptions options;
  options.budget_bytes = 4 * kPage;
  const auto pool = PinnedPool::create(reactor, placed(options));
  const auto twice = [](PinnedPool& p) -> Task<> {
    const LeaseRequest request = want(Purpose::kParams, 3, 0);
    const Lease first = co_await p.acquire(request);
    const Lease second = co_await p.acquire(request);
  };
  EXPECT_THROW(reactor.block_on(twice(*pool)), Error);
  EXPECT_EQ(pool->free_bytes(), 4 * kPage);
  reactor.stop();
}

TEST_P(LeaseRules, rule_4_a_wrong_prefetch_is_given_up_before_a_lock_up_is_reported) {
  const auto pool = make(4);
  start(*pool, "guess", want(Purpose::kParams, 4, 1));
  pool->offer(leases_["guess"], {0, 1}, [this] { leases_.erase("guess"); });
  const auto demand = [](PinnedPool& p) -> Task<> {
    const LeaseRequest request = want(Purpose::kParams, 4, 5);
    const Lease lease = co_await p.acquire(request);
  };
  EXPECT_NO_THROW(reactor_.block_on(demand(*pool)));
}

// What a step of many chunks costs. All of them wait at once here: more than the engine lets wait.
TEST_P(LeaseRules, what_a_lease_costs_does_not_depend_on_how_many_wait_and_how_many_are_out) {
  const auto looked_at_for = [this](std::uint64_t leases) {
    const auto pool = make(leases, {{Purpose::kParams, 4 * kPage}});
    std::vector<Lease> out;
    while (Lease lease = pool->try_acquire(want(Purpose::kGradients, 1, 0)))
      out.push_back(std::move(lease));
    for (std::uint64_t i = 0; i < leases; ++i) {
      const auto purpose = i % 2 == 0 ? Purpose::kOptimizer : Purpose::kStaging;
      reactor_.spawn(hold(*pool, std::to_string(i), want(purpose, 1, leases - i)), {});
    }
    reactor_.run_until_idle();
    EXPECT_EQ(pool->waiting(), leases);
    out.clear();
    while (pool->waiting() > 0) {
      reactor_.run_until_idle();
      leases_.clear();
    }
    reactor_.run_until_idle();
    leases_.clear();
    return pool->looked_at() / leases;
  };
  EXPECT_EQ(looked_at_for(100), looked_at_for(5000));
}

TEST_P(LeaseRules, what_taking_back_costs_does_not_depend_on_how_much_could_be_taken) {
  const auto looked_at_for = [this](std::uint64_t leases) {
    const auto pool = make(leases);
    for (std::uint64_t i = 0; i < leases; ++i) {
      const std::string name = std::to_string(i);
      leases_[name] = pool->try_acquire(want(Purpose::kOptimizer, 1, 1000 + i));
      pool->offer(leases_[name], {0, 1000 + i}, [this, name] { leases_.erase(name); });
    }
    const std::uint64_t before = pool->looked_at();
    start(*pool, "demand", want(Purpose::kGradients, 2, 1));
    EXPECT_EQ(leases_.count("demand"), 1u);
    start(*pool, "later than any", want(Purpose::kGradients, 1, 1000000));
    EXPECT_EQ(pool->waiting(), 1u);
    const std::uint64_t looked_at = pool->looked_at() - before;
    leases_.clear();
    reactor_.run_until_idle();
    leases_.clear();
    return looked_at;
  };
  EXPECT_EQ(looked_at_for(100), looked_at_for(5000));
}

TEST_P(LeaseRules, what_can_never_fit_is_refused_at_once) {
  const auto pool = make(8, {{Purpose::kParams, 6 * kPage}});
  start(*pool, "too large", want(Purpose::kOptimizer, 3, 0));
  EXPECT_EQ(code_of("too large"), ErrorCode::kInvalidArgument);
  EXPECT_THAT(message_, HasSubstr("8.0 KiB"));
  start(*pool, "nothing", want(Purpose::kParams, 0, 0));
  EXPECT_EQ(code_of("nothing"), ErrorCode::kInvalidArgument);
  start(*pool, "fits its reserve", want(Purpose::kParams, 6, 0));
  EXPECT_THAT(served_, ElementsAre("fits its reserve"));
  leases_.clear();
}

TEST_P(LeaseRules, the_account_is_by_purpose_and_keeps_peaks) {
  const auto pool = make(16);
  start(*pool, "a", want(Purpose::kParams, 3, 0));
  start(*pool, "b", want(Purpose::kGradients, 5, 0));
  drop("a");
  const Account account = pool->account();
  EXPECT_EQ(account.capacity_bytes(), 16 * kPage);
  EXPECT_EQ(account.used_bytes(), 5 * kPage);
  EXPECT_EQ(account.peak_bytes(), 8 * kPage);
  EXPECT_EQ(account.peak_bytes(Purpose::kParams), 3 * kPage);
  leases_.clear();
}

TEST_P(LeaseRules, a_lease_may_come_back_on_any_thread_and_wakes_who_waits) {
  const auto pool = make(4);
  start(*pool, "holder", want(Purpose::kParams, 4, 0));
  start(*pool, "waiter", want(Purpose::kParams, 4, 1));
  std::thread([lease = std::move(leases_["holder"])]() mutable { lease.reset(); }).join();
  reactor_.run_until_idle();
  EXPECT_THAT(served_, ElementsAre("holder", "waiter"));
  leases_.clear();
}

TEST_P(LeaseRules, a_pool_may_go_away_with_people_waiting_and_work_posted) {
  auto pool = make(4);
  start(*pool, "holder", want(Purpose::kParams, 4, 0));
  start(*pool, "waiter", want(Purpose::kParams, 4, 1));
  leases_.clear();  // posts the service of the waiter
  pool.reset();
  reactor_.run_until_idle();
  EXPECT_EQ(code_of("waiter"), ErrorCode::kCancelled);
}

// Memory may be held until its holder is torn down, which is after all who wait have ended.
TEST_P(LeaseRules, a_cancelled_scope_fails_everybody_who_waits_and_who_comes) {
  CancelScope scope(reactor_);
  const auto pool = make(4, {}, &scope);
  start(*pool, "holder", want(Purpose::kParams, 4, 0));
  start(*pool, "waiter", want(Purpose::kParams, 4, 1));
  scope.cancel(std::make_exception_ptr(Error(ErrorCode::kCancelled, "stop")));
  start(*pool, "late", want(Purpose::kParams, 4, 2));
  EXPECT_EQ(code_of("waiter"), ErrorCode::kCancelled);
  EXPECT_EQ(code_of("late"), ErrorCode::kCancelled);
  EXPECT_EQ(pool->waiting(), 0u);
  leases_.clear();
}

INSTANTIATE_TEST_SUITE_P(Machines, LeaseRules, ::testing::Values(1, 2), [](const auto& machine) {
  return machine.param == 1 ? "one_node" : "two_nodes";
});

}  // namespace lease_rules_test
}  // namespace ziggurat
