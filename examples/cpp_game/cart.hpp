// A cart on a track with a pole on a hinge, which falls unless the cart is pushed the right way.
//
// The equations are those of Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult
// learning control problems" (IEEE Transactions on Systems, Man, and Cybernetics 13, 1983), with friction.
#ifndef CART_HPP
#define CART_HPP

#include <array>
#include <cmath>
#include <random>

constexpr double PI = 3.14159265358979323846;
constexpr double GRAVITY = 9.8;            // m/s^2
constexpr double CART_MASS = 1.0;          // kg
constexpr double POLE_MASS = 0.1;          // kg
constexpr double HALF_LENGTH = 0.5;        // m, from the hinge to the pole's centre
constexpr double CART_FRICTION = 0.0005;   // of the cart on the track
constexpr double POLE_FRICTION = 0.000002; // of the hinge
constexpr double PUSH = 10.0;              // N, to the left or to the right
constexpr double STEP_S = 0.02;
constexpr double TRACK_END = 2.4;          // m from the centre
constexpr double LARGEST_ANGLE = 12 * PI / 180;
constexpr int MOST_STEPS = 500; // an episode is cut then

inline double sign(double number) { return number > 0 ? 1 : number < 0 ? -1 : 0; }

struct Cart {
  double position = 0, speed = 0;      // m, m/s
  double angle = 0, angular_speed = 0; // rad from upright, rad/s
  int steps = 0;                       // of this episode

  void reset(std::mt19937 &random) {
    std::uniform_real_distribution<double> small(-0.05, 0.05);
    position = small(random);
    speed = small(random);
    angle = small(random);
    angular_speed = small(random);
    steps = 0;
  }

  // Moves on by STEP_S, by Euler's method as published.
  void push(double force) {
    const double mass = CART_MASS + POLE_MASS;
    const double pole_moment = POLE_MASS * HALF_LENGTH;
    const double sine = std::sin(angle), cosine = std::cos(angle);

    const double swing = pole_moment * angular_speed * angular_speed * sine;
    const double driving = (-force - swing + CART_FRICTION * sign(speed)) / mass;
    const double hinge = POLE_FRICTION * angular_speed / pole_moment;
    const double inertia = HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cosine * cosine / mass);
    const double angular_acceleration = (GRAVITY * sine + cosine * driving - hinge) / inertia;
    const double reaction = pole_moment * angular_acceleration * cosine;
    const double acceleration = (force + swing - reaction - CART_FRICTION * sign(speed)) / mass;

    position += STEP_S * speed;
    speed += STEP_S * acceleration;
    angle += STEP_S * angular_speed;
    angular_speed += STEP_S * angular_acceleration;
    steps++;
  }

  // What a player of the game sees.
  std::array<float, 4> seen() const {
    return {static_cast<float>(position), static_cast<float>(speed), static_cast<float>(angle),
            static_cast<float>(angular_speed)};
  }

  bool has_fallen() const { return std::abs(position) > TRACK_END || std::abs(angle) > LARGEST_ANGLE; }
};

#endif
