// Carts that balance poles: a game with its own physics and its own loop, which asks Penstock what each cart does.
#include "cart.hpp"
#include "penstock_game.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// What the game shows and what it takes, as docs/games-protocol.md writes spaces.
constexpr char OBSERVATION[] = R"({"Box": [-1e30, 1e30, [4], "<f4"]})";
constexpr char ACTION[] = R"({"Discrete": [2, 0]})";

struct Settings {
  penstock::Options service;
  double hz = 0;          // ticks a second; 0: as many as possible
  long episodes = 0;      // after so many the game ends; 0: never
  bool is_shown = false;  // the first cart, as text
};

class PoleGame {
 public:
  explicit PoleGame(const Settings &settings)
      : settings_(settings),
        game_(settings.service),
        carts_(settings.service.seats),
        is_playing_(settings.service.seats) {}

  // The loop of the game: the world moves on, what was seen is sent, and actions are taken when they come.
  void play() {
    auto due = Clock::now();
    while (settings_.episodes == 0 || episodes_ < settings_.episodes) {
      tick();
      bool is_connected = game_.send();
      if (settings_.hz > 0) {
        // Until the next tick. A cart whose action is late stands still meanwhile.
        due += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(1 / settings_.hz));
        const double left_s = std::chrono::duration<double>(due - Clock::now()).count();
        is_connected = is_connected && game_.wait(std::max(left_s, 0.0));
        std::this_thread::sleep_until(due);
      } else {
        is_connected = is_connected && game_.wait();
      }
      if (!is_connected) begin_anew();
    }
  }

 private:
  // Moves every cart that knows what to do, and adds a row of what it brought.
  void tick() {
    const auto obs = game_.column<float>("obs");
    for (std::uint32_t seat = 0; seat < carts_.size(); seat++) {
      Cart &cart = carts_[seat];
      unsigned flags = 0;
      float reward = 0;
      if (const auto action = game_.action<std::int64_t>(seat); is_playing_[seat] && action) {
        cart.push(action[0] == 1 ? PUSH : -PUSH);
        reward = 1;
        if (cart.has_fallen()) flags = penstock::terminated;
        else if (cart.steps == MOST_STEPS) flags = penstock::truncated;
        if (flags) count_episode(cart.steps);
        is_playing_[seat] = !flags;
      } else if (game_.phase(seat) != PENSTOCK_WAITS) {
        cart.reset(random_);
        flags = penstock::first;
        is_playing_[seat] = true;
      } else {
        continue;
      }

      std::uint8_t *row = game_.add_row(seat, flags, reward);
      if (!row) return;  // the connection is lost, as `send` says too
      const auto seen = cart.seen();
      std::copy(seen.begin(), seen.end(), obs.in(row).begin());
    }
    if (settings_.is_shown) show(carts_[0]);
  }

  // The service is gone: the episodes in progress are lost, and all begin anew when it is there again.
  void begin_anew() {
    std::cout << game_.error() << std::endl;
    is_playing_.assign(carts_.size(), false);
    game_.reconnect();
  }

  void count_episode(int steps) {
    episodes_++;
    recent_steps_ += steps;
    recent_++;
    if (recent_ == 100) {
      report();
      recent_ = 0;
      recent_steps_ = 0;
    }
  }

  // Prints the mean of the last hundred episodes, once a second at most.
  void report() {
    const auto now = Clock::now();
    const bool is_last = settings_.episodes && episodes_ >= settings_.episodes;
    if (now - reported_ < std::chrono::seconds(1) && !is_last) return;
    reported_ = now;
    std::printf("%ld episodes, the last hundred of %.1f steps\n", episodes_, static_cast<double>(recent_steps_) / 100);
    std::fflush(stdout);
  }

  static void show(const Cart &cart) {
    std::string line(61, ' ');
    const auto column = [](double metres) { return static_cast<std::size_t>(30 + std::lround(metres * 12)) % 61; };
    line[column(cart.position)] = '#';
    line[column(cart.position + 2 * HALF_LENGTH * std::sin(cart.angle))] = 'o';
    std::printf("\r|%s| %3d", line.c_str(), cart.steps);
    std::fflush(stdout);
  }

  Settings settings_;
  penstock::Game game_;
  std::vector<Cart> carts_;
  std::vector<bool> is_playing_;
  std::mt19937 random_{std::random_device{}()};
  long episodes_ = 0;
  long recent_ = 0, recent_steps_ = 0;  // since the last full hundred
  Clock::time_point reported_{};
};

constexpr char USAGE[] =
    "usage: pole [--host HOST] [--port PORT] [--carts N] [--token TOKEN] [--hz TICKS] [--episodes N] [--show]\n"
    "  --hz 50 is real time; without it the game runs as fast as it is answered\n";

// Throws std::invalid_argument for what is no option.
Settings read_settings(int count, char **arguments) {
  Settings settings;
  settings.service.port = 8900;
  settings.service.seats = 64;
  settings.service.observation = OBSERVATION;
  settings.service.action = ACTION;
  settings.service.name = "pole";
  settings.service.patience_s = 600;  // while the service starts, or is restarted
  for (int i = 1; i < count; i++) {
    const std::string name = arguments[i];
    if (name == "--show") {
      settings.is_shown = true;
      continue;
    }
    if (i + 1 == count) throw std::invalid_argument(USAGE);
    const std::string value = arguments[++i];
    if (name == "--host") settings.service.host = value;
    else if (name == "--port") settings.service.port = static_cast<std::uint16_t>(std::stoul(value));
    else if (name == "--carts") settings.service.seats = static_cast<std::uint32_t>(std::stoul(value));
    else if (name == "--token") settings.service.token = value;
    else if (name == "--hz") settings.hz = std::stod(value);
    else if (name == "--episodes") settings.episodes = std::stol(value);
    else throw std::invalid_argument(USAGE);
  }
  return settings;
}

}  // namespace

int main(int count, char **arguments) {
  Settings settings;
  try {
    settings = read_settings(count, arguments);
  } catch (const std::logic_error &) {  // of read_settings, or of a number that is none
    std::cerr << USAGE;
    return 2;
  }
  try {
    PoleGame(settings).play();
  } catch (const std::exception &error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
