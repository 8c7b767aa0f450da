"""PyBullet's walkers, stepped with a few calls into the simulator in the place of a hundred: the same numbers to the
last bit. Of the 1.15 ms that a step of HumanoidBulletEnv-v0 takes in its package, the physics are 0.4."""

import functools
from typing import Any

import numpy as np
import pybullet
from pybullet_envs_gymnasium import robot_locomotors

from sparring.games.catalog import silent

__all__ = ["quicken"]


class _Quick:
    """Overrides what `WalkerBase` does joint by joint and part by part."""

    def robot_specific_reset(self: Any, bullet_client: Any) -> None:
        super().robot_specific_reset(bullet_client)  # type: ignore[misc]
        self.client = bullet_client._client
        self.body = self.ordered_joints[0].bodies[0]
        self.joints = [joint.jointIndex for joint in self.ordered_joints]
        self.low = np.array([joint.lowerLimit for joint in self.ordered_joints])
        self.span = np.array([joint.upperLimit for joint in self.ordered_joints]) - self.low
        motors = getattr(self, "motors", self.ordered_joints)
        self.driven = [motor.jointIndex for motor in motors]
        coefficients = getattr(self, "motor_power", [motor.power_coef for motor in motors])
        self.strength = np.array([self.power * coefficient for coefficient in coefficients])

    def apply_action(self: Any, a: Any) -> None:
        assert np.isfinite(a).all()
        # The package multiplies a humanoid's in the action's precision, the others' in float64.
        dtype = a.dtype if hasattr(self, "motors") else np.float64
        forces = (self.strength.astype(dtype) * np.clip(a, -1, 1)).tolist()
        mode = pybullet.TORQUE_CONTROL
        pybullet.setJointMotorControlArray(self.body, self.driven, mode, forces=forces, physicsClientId=self.client)

    def calc_state(self: Any) -> Any:
        states = pybullet.getJointStates(self.body, self.joints, physicsClientId=self.client)
        position = 2 * (np.array([state[0] for state in states]) - self.low) / self.span - 1.0
        joints = np.empty(2 * len(states), np.float32)
        joints[0::2], joints[1::2] = position, [0.1 * state[1] for state in states]
        self.joint_speeds = joints[1::2]
        self.joints_at_limit = np.count_nonzero(np.abs(joints[0::2]) > 0.99)
        places = self._places()
        base, turn = self._pose(self.robot_body)
        self.body_xyz = (places[:, 0].mean(), places[:, 1].mean(), np.float64(base[2]))
        self.body_real_xyz, self.body_rpy = np.array(base), pybullet.getEulerFromQuaternion(turn)
        if self.initial_z is None:
            self.initial_z = self.body_xyz[2]
        roll, pitch, yaw = self.body_rpy
        ahead, aside = self.walk_target_x - self.body_xyz[0], self.walk_target_y - self.body_xyz[1]
        self.walk_target_theta = np.arctan2(aside, ahead)
        self.walk_target_dist = np.linalg.norm([aside, ahead])
        angle = self.walk_target_theta - yaw
        cos, sin = np.cos(-yaw), np.sin(-yaw)
        speed = np.dot(np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]), self.robot_body.speed())
        more = [self.body_xyz[2] - self.initial_z, np.sin(angle), np.cos(angle), *(0.3 * speed), roll, pitch]
        return np.clip(np.concatenate([np.array(more, np.float32), joints, self.feet_contact]), -5, +5)

    def _places(self: Any) -> Any:
        """Where every part is, in the order of `parts`; the floor joins them after the first reset."""
        if len(self.parts) != getattr(self, "known_parts", 0):
            self.known_parts = len(self.parts)
            links = {i: part.bodyPartIndex for i, part in enumerate(self.parts.values()) if part.bodyPartIndex >= 0}
            self.link_rows, self.links = list(links), list(links.values())
            self.bases = [(i, part) for i, part in enumerate(self.parts.values()) if i not in links]
        places = np.empty((len(self.parts), 3))
        found = pybullet.getLinkStates(self.body, self.links, physicsClientId=self.client)
        places[self.link_rows] = [state[0] for state in found]
        for i, part in self.bases:
            places[i] = self._pose(part)[0]
        return places

    def _pose(self: Any, part: Any) -> Any:
        body = part.bodies[part.bodyIndex]
        if part.bodyPartIndex < 0:
            return pybullet.getBasePositionAndOrientation(body, physicsClientId=self.client)
        return pybullet.getLinkState(body, part.bodyPartIndex, physicsClientId=self.client)[:2]


QUICK = {
    robot: type(robot.__name__, (_Quick, robot), {})
    for robot in (getattr(robot_locomotors, name) for name in ("Hopper", "Walker2D", "HalfCheetah", "Ant", "Humanoid"))
}


def quicken(env: Any) -> Any:
    """The same environment; unknown robots stay as they are."""
    raw = env.unwrapped
    robot = getattr(raw, "robot", None)
    if type(robot) in QUICK:
        robot.__class__ = QUICK[type(robot)]
    if robot is not None:
        reset = raw.reset

        @functools.wraps(reset)
        def first(**options: Any) -> Any:
            """Connects to the simulator, which prints."""
            del raw.reset  # the instance's, so the class's from now on
            with silent():
                return reset(**options)

        raw.reset = first
    return env
